"""Recognise secrets by their format, and by the name of their variable or option.

This is the filter for everything that is stored or printed. A case with a secret is refused, and a variable
with a secret is not recorded. In text from other sources, secrets are replaced (`masked`). In a case, a
secret without a typical format cannot be distinguished from an ordinary value. Such a value is refused only
if the name of its variable or option always means a secret. This module imports nothing of perfsuite.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence

MASK = "***"

# Names are matched as lower-case words joined by underscores: `--hub.apiKey` becomes `hub_api_key`.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_SERVICE = (
    r"hf|hub|huggingface|github|gh|gitlab|gl|wandb|comet|neptune|clearml|mlflow|slack|pypi|npm|aws|azure|git|ngc"
    r"|openai|anthropic|dagshub|databricks|telegram|discord"
)
_ALWAYS = re.compile(  # names that always mean a secret
    r"passwords?(_|$)|passwd(_|$)|(^|_)(passphrase|secrets?|credentials?|webhook|dsn|jwt|authorization)(_|$)"
    r"|(^|_)(cookies?|bearer)$|(^|_)connection_?string$|(^|_)[a-z]+_pwd$|(^|_)pat(_\d+)?$|^token(_\d+)?$"
    r"|(^|_)(api|access|auth|private|secret|ssh|signing|encryption|account|master|license)_?key(_|$)"
    r"|(^|_)(wandb|comet|neptune)_?key(_|$)"
    r"|(^|_)(api|access|auth|bearer|refresh|private|secret|session|csrf|personal)_?token(_\d+)?$"
    rf"|(^|_)({_SERVICE})_?((bot|user|login|job|read|write)_?)?(token|key|pat)(_\d+)?$"
    r"|(^|_)(http|https|proxy|basic|registry|docker|npm)_?auth$"
    r"|(^|_)(db|pg|mysql|postgres|redis|mongo|smtp|mail|email|http|https|proxy|ftp|ldap|registry|docker|nvidia|ngc"
    r"|user|admin|root|sudo)_?pass$"
)
_OFTEN = re.compile(r"(^|_)(pass|auth|tokens?|session(_id|_key)?)(_\d+)?$")
"""Names that can mean a secret, depending on the value. For example, `tokens` can be the tokens of a text."""
_KEY = re.compile(r"(^|_)keys?(_(?!value|dim|size|head|len|cache|padding|states?|bias|proj|norm)|$)")
_NO_SECRET = re.compile(  # values that are not secrets: switches, short numbers and special tokens
    r"|true|false|yes|no|on|off|none|null|auto|default|required|optional|\d{1,3}|<[^<>]*>|\[[A-Z]+\]",
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r"\$[A-Z_][A-Z0-9_]*|\$\{[^{}]*\}|\{\w*\}|\*+|<\w+>"
)  # references to a value elsewhere
_SHORT = re.compile(  # prefixes of secrets, used if the name of the variable or option can mean a secret
    r"(hf_|gh[pousr]_|github_pat_|glpat-|sk[-_]|xox[a-z]-|AKIA|ASIA|AIza|eyJ|nvapi-|pypi-|npm_)[\w.-]"
)
_PATTERN = re.compile(r"[*?^$|\\]")  # characters of file name patterns
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_HEX = re.compile(r"(?=.*\d)[0-9a-f]{20,}", re.IGNORECASE)

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
    | (?i:\bbasic)\s+(?P<basic>[A-Za-z0-9+/]{6,}=*)
    """
)
_NAMED = re.compile(  # a name and its value in a text; a group matches the value
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
# `user:password@` in any address. In a web address, `token@` matches as well, because there, a name without
# a password is a token.
_ADDRESS = re.compile(
    r"(?P<scheme>://)(?P<userinfo>[^\s/@:\"'<>]*:[^\s/\"'<>]+)@"
    r"|(?P<web>(?i:https?|ftps?)://)(?!git@)(?P<token>[^\s/@:\"'<>]+)@"
)


def masked(text: str) -> str:
    """Replace everything that looks like a secret in a text with `***`."""
    return "".join(_without_secrets(text))


def _without_secrets(text: str) -> Iterator[str]:
    at = 0
    for begin, end in _spans(text):
        if begin >= at:
            yield text[at:begin] + MASK
        at = max(at, end)
    yield text[at:]


def _spans(text: str) -> list[tuple[int, int]]:
    """Return the beginning and end of each secret, in order."""
    secrets = [
        match.span()
        for match in _VALUE.finditer(text)
        if match["basic"] is None or _is_user_and_password(match["basic"])
    ]
    for pattern in (_NAMED, _ADDRESS):
        for match in pattern.finditer(text):
            for name, value in match.groupdict().items():
                if name in ("scheme", "web") or not value:
                    continue
                password = value.rpartition(":")[2] if name == "userinfo" else value
                secrets += [] if _is_harmless(password) else [match.span(name)]
    return sorted(secrets)


def _is_user_and_password(word: str) -> bool:
    """Return whether the word after `basic` is `user:password` in base64, and not an ordinary word."""
    try:
        return ":" in base64.b64decode(word + "=" * (-len(word) % 4), validate=True).decode()
    except ValueError:
        return False


def _is_harmless(value: str) -> bool:
    return bool(_NO_SECRET.fullmatch(value) or _REFERENCE.fullmatch(value))


def _looks_secret(value: str) -> bool:
    """Return whether a value looks machine-generated rather than like a word, number or special token."""
    if _SHORT.match(value) or _ID.fullmatch(value):
        return True
    return not re.search(r"[\s<>\[\]{}|]", value) and any(map(_is_random, re.split(r"[^A-Za-z0-9]+", value)))


def _is_random(word: str) -> bool:
    """Return whether upper case, lower case and digits alternate more than in a name (`Conv2dForLlama3`)."""
    if _HEX.fullmatch(word):
        return True
    if len(re.findall(r"[A-Za-z]+|\d+", word)) >= 5:
        return len(word) >= 10
    return len(word) >= 12 and not word.isdigit() and len(word) < 3 * len(_CAMEL.sub("_", word).split("_"))


def _words_of(name: str) -> str:
    parts = _CAMEL.sub("_", name.strip().lstrip("-+~"))
    return re.sub(r"[^A-Za-z0-9]+", "_", parts).strip("_").lower()


def is_secret(name: str, value: str, *, is_declared: bool = False) -> bool:
    """Return whether name and value of a variable or option look like a secret.

    Hiding a value costs little, so a name that can mean a secret is usually enough. With `is_declared`, the
    value is in a case, and a case is refused if one of its values is taken for a secret. So if the name does
    not always mean a secret, the value must look like a secret as well.
    """
    if not value.strip() or _REFERENCE.fullmatch(value):
        return False
    if masked(value) != value:
        return True
    words = _words_of(name)
    is_plain = bool(_NO_SECRET.fullmatch(value) or (words.endswith("pat") and _PATTERN.search(value)))
    if _ALWAYS.search(words):
        return not (is_plain and is_declared)
    if _OFTEN.search(words) or _KEY.search(words):
        return _looks_secret(value) if is_declared else not is_plain
    return False


def secret_variable(given: Mapping[str, str]) -> str | None:
    """Return the name of the first variable of a case that looks like a secret, or None.

    Unlike an option, a variable that is just named `key` or `pass` is always a secret.
    """
    for name, value in given.items():
        is_bare = _words_of(name) in ("key", "pass") and not _is_harmless(value)
        if is_secret(name, value, is_declared=True) or is_bare:
            return name
    return None


def secret_word(words: Sequence[str]) -> str | None:
    """Return the first of a command's words that contains a secret (`--password=x`) or stands before one.

    The word is returned in a form that can be shown: the part before the secret, or `***` if that part is
    empty. Returns None if no word of the command is or contains a secret.
    """
    for number, word in enumerate(words):
        secrets = _spans(word)
        if secrets:
            return word[: secrets[0][0]].rstrip("=:/\"' ") or MASK
        name, equals, value = word.partition("=")
        if equals and is_secret(name, value, is_declared=True):
            return name
        following = words[number + 1] if number + 1 < len(words) else ""
        takes_value = word.startswith("-") and not equals and not re.match(r"-\D", following)
        if takes_value and is_secret(word, following, is_declared=True):
            return word
    return None
