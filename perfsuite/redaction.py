"""Finds secrets by the name of what holds them and by how they look. Imports nothing of perfsuite.

One filter for all that is stored or printed: a case with a secret is refused, a variable with one is not
recorded, and in text that others wrote (`masked`) a secret is replaced. What looks like no secret and has a
harmless name passes, as nobody could tell it from an ordinary value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

MASK = "***"

# A name as words between underscores, in lower case: `--hub.apiKey` is `hub_api_key`.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_ALWAYS = re.compile(  # names that hold nothing but secrets
    r"passwords?(_|$)|passwd(_|$)|(^|_)(passphrase|secrets?|credentials?|webhook|dsn|jwt|authorization)(_|$)"
    r"|(^|_)connection_?string$|(^|_)[a-z]+_pwd$"
    r"|(^|_)(api|access|auth|private|secret|ssh|signing|encryption|account|master|wandb|comet|neptune)_?key(_|$)"
    r"|(^|_)(api|access|auth|bearer|refresh|private|secret|session|csrf|bot|user|login|personal)_?tokens?(_\d+)?$"
    r"|(^|_)(hf|hub|huggingface|github|gh|gitlab|gl|wandb|comet|neptune|clearml|mlflow|slack|pypi|npm|aws|azure"
    r"|git|ngc|openai|anthropic|dagshub|databricks|telegram|discord)_?(token|key|pat)(_\d+)?$"
)
_OFTEN = re.compile(  # names that hold secrets, unless the value says something else
    r"(^|_)(pass|pat|auth|cookies?|bearer|token|session(_id|_key)?)(_\d+)?$"
)
_OF_A_VARIABLE = re.compile(r"(^|_)key(_(?!value|dim|size|head|len|cache|padding|states?|bias|proj|norm)|$)")
"""In variables a key is a secret, in options (`--key text`) only if its value looks like one."""
_HARMLESS = re.compile(  # a text's tokens, its samples' keys, and passes over data
    r"(^|_)(pad|eos|bos|unk|mask|sep|cls|start|end|stop|image|video|audio|new|special|extra|per|text|label"
    r"|prefix|suffix|begin|system|assistant|next|last|first|decoder|think|cache|sort|group|index|dict|column"
    r"|dataset|data|sample|input|output|prompt|response|question|answer|primary|foreign|rng|prng|random|metric"
    r"|forward|backward|second|single|multi|one|two|num|n|max|min|by|p)_(token|key|pass|pat)(_id)?$"
)
_NO_SECRET = re.compile(  # values of options that switch something, count, or name a special token
    r"|true|false|yes|no|on|off|none|null|auto|default|required|optional|\d{1,3}|<[^<>]*>|\[[A-Z]+\]",
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r"\$[A-Z_][A-Z0-9_]*|\$\{[^{}]*\}|\{\w*\}|\*+|<\w+>"
)  # to a value that stands elsewhere
_SHORT = re.compile(  # as secrets begin: enough under a name that may hold one
    r"(hf_|gh[pousr]_|github_pat_|glpat-|sk[-_]|xox[a-z]-|AKIA|ASIA|AIza|eyJ|nvapi-|pypi-|npm_)[\w.-]"
)
_RANDOM = re.compile(r"(?=[^\s/]*\d)(?=[^\s/]*[A-Za-z])[\w+=~.-]{24,}")

_VALUE = re.compile(
    r"""(?x)
    -----BEGIN\ [A-Z0-9 ]*PRIVATE\ KEY-----(?s:.*?)(?:-----END\ [A-Z0-9 ]*PRIVATE\ KEY-----|\Z)
    | (?<![A-Za-z0-9])(?:
        (?:hf|api_org)_[A-Za-z0-9]{20,}
      | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{16,}
      | gl(?:pat|rt|dt|ptt|cbt|soat|ft|imt|agent)-[\w-]{16,}
      | xox[a-z]-[A-Za-z0-9-]{8,} | xapp-[A-Za-z0-9-]{16,}
      | (?:AKIA|ASIA|AROA|AIDA|AGPA)[A-Z0-9]{16}(?![A-Za-z0-9])
      | AIza[\w-]{30,} | ya29\.[\w-]{16,}
      | eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*
      | (?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,} | whsec_[A-Za-z0-9]{16,}
      | nvapi-[\w-]{16,} | pypi-AgE[\w-]{16,} | npm_[A-Za-z0-9]{30,} | dop_v1_[a-f0-9]{30,}
      )
    | (?<![A-Za-z0-9-])sk-(?:[A-Za-z0-9]{20,}|(?=[\w-]{0,60}[0-9])(?=[\w-]{0,60}[A-Z])[\w-]{20,})
    | (?i:\bbearer)\s+(?=\S{0,80}[0-9A-Z._~+/=-])[A-Za-z0-9._~+/=-]{8,}
    | (?i:\bbasic)\s+(?=[A-Za-z0-9+/]{0,80}[0-9=])[A-Za-z0-9+/]{10,}=*
    """
)
_NAMED = re.compile(  # a name and its value in a text, the latter as a group
    r"""(?xi)
    (?: (?:proxy-)?authorization | cookie | (?:private|job)-token )["']?\ ?[:=]\s*["']?
      (?P<header>[^\s"'][^"'\r\n]{3,})
    | (?: passw(?:or)?d | passphrase | client[_-]?secret | api[_-]?key | secret[_-]?key
        | access[_-]?key(?:[_-]id)? | account[_-]?key
        | (?:api|access|auth|refresh|hf|hub|hugging_face_hub|github|gitlab|wandb)[_-]?token
        | (?<![a-z])(?:mysql|pg|db)[_-]?(?:pwd|pass)
      )["']?\ ?[:=]\s*["']?(?P<assigned>[^\s"',;&}{]{4,})
    | [?&](?: token | sig | signature | x-amz-signature | key | code )=(?P<query>[^&\s"']{8,})
    | (?: hooks\.slack\.com/(?:services|workflows|triggers) | discord(?:app)?\.com/api/webhooks )
      /(?P<hook>[^\s"']+)
    """
)
# `user:password@` in any address, and `token@` where a name alone means no user: on the web.
_ADDRESS = re.compile(
    r"(?P<scheme>://)(?P<userinfo>[^\s/@:\"'<>]*:[^\s/\"'<>]+)@"
    r"|(?P<web>(?i:https?|ftps?)://)(?!git@)(?P<token>[^\s/@:\"'<>]+)@"
)


def masked(text: str) -> str:
    """Return text that others wrote with `***` in place of what looks like a secret."""
    return "".join(_without_secrets(text))


def _without_secrets(text: str) -> Iterator[str]:
    at = 0
    for begin, end in _spans(text):
        if begin >= at:
            yield text[at:begin] + MASK
        at = max(at, end)
    yield text[at:]


def _spans(text: str) -> list[tuple[int, int]]:
    """Return where secrets begin and end, in their order."""
    found = [match.span() for match in _VALUE.finditer(text)]
    for pattern in (_NAMED, _ADDRESS):
        for match in pattern.finditer(text):
            for name, value in match.groupdict().items():
                if name in ("scheme", "web") or not value:
                    continue
                password = value.rpartition(":")[2] if name == "userinfo" else value
                found += [] if _is_harmless(password) else [match.span(name)]
    return sorted(found)


def _is_harmless(value: str) -> bool:
    return bool(_NO_SECRET.fullmatch(value) or _REFERENCE.fullmatch(value))


def _words_of(name: str) -> str:
    parts = _CAMEL.sub("_", name.strip().lstrip("-+~"))
    return re.sub(r"[^A-Za-z0-9]+", "_", parts).strip("_").lower()


def is_secret(name: str, value: str, *, is_option: bool = False) -> bool:
    """Whether a variable's or an option's name and value look as if they held a secret."""
    if not value.strip() or _REFERENCE.fullmatch(value):
        return False
    if masked(value) != value:
        return True
    words = _words_of(name)
    if _HARMLESS.search(words):
        return bool(_SHORT.match(value))
    if _ALWAYS.search(words):
        return not (is_option and _NO_SECRET.fullmatch(value))
    if _OFTEN.search(words):
        is_pattern = bool(re.search(r"[*?^$|\\]", value))
        return not (_NO_SECRET.fullmatch(value) or is_pattern)
    if _OF_A_VARIABLE.search(words):
        return not is_option or bool(_SHORT.match(value) or _RANDOM.fullmatch(value))
    return False


def secret_variable(given: Mapping[str, str]) -> str | None:
    """Return the name of the first variable that looks as if it held a secret, or None."""
    return next((name for name, value in given.items() if is_secret(name, value)), None)


def secret_word(words: Sequence[str]) -> str | None:
    """Return the first word of a command that looks as if it (`--password=x`), or the next, held a secret.

    It is returned as it may be shown: what stands in front of the secret, `***` if nothing does.
    """
    for number, word in enumerate(words):
        if found := _spans(word):
            return word[: found[0][0]].rstrip("=:/\"' ") or MASK
        name, equals, value = word.partition("=")
        if equals and is_secret(name, value, is_option=True):
            return name
        following = words[number + 1] if number + 1 < len(words) else ""
        takes_value = word.startswith("-") and not equals and not re.match(r"-\D", following)
        if takes_value and is_secret(word, following, is_option=True):
            return word
    return None
