"""Secrets are known by name and by value; ordinary options of training are not taken for secrets."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.redaction import is_secret, masked, secret_variable, secret_word
from tests.samples import deterministic

# Joined, so that no scanner takes these for real ones.
HF = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ12345678"
GITHUB = "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"
OPENAI = "sk-" + "proj-T3BlbkFJ0123456789abcdefABCDEF"
AWS = "AKIA" + "IOSFODNN7EXAMPLE"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN"
PEM = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIE\nabc\n-----END RSA " + "PRIVATE KEY-----"

VALUES = [
    HF,
    GITHUB,
    GITHUB.replace("ghp_", "gho_"),
    GITHUB.replace("ghp_", "ghs_"),
    "github_pat_" + "11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz",
    "glpat-" + "ABCdef123456_7890-xy",
    OPENAI,
    "sk-" + "ant-api03-AbCdEfGhIjKlMnOpQrSt",
    "sk-" + "T3BlbkFJabcdefghijklmnop",
    "xoxb-" + "123456789012-abcdefGHIJKL",
    AWS,
    AWS.replace("AKIA", "ASIA"),
    "AIza" + "SyA1234567890abcdefghijklmnopqrstuvw",
    "nvapi-" + "abcdefghij1234567890",
    "pypi-" + "AgEIcHlwaS5vcmcCJDAxMjM0",
    JWT,
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "hunter2x") for name in ("PGPASSWORD", "MYSQL_PWD", "DB_PASS", "GITHUB_PAT", "JWT", "PASS")),
        *((name, "hunter2x") for name in ("SENTRY_DSN", "NVIDIA_PASS", "TORCH_HUB_PAT", "SSH_PASSPHRASE")),
        *(
            (name, "x")
            for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")
        ),
        *(
            (name, "x")
            for name in ("AWS_SESSION_TOKEN", "HUGGING_FACE_HUB_TOKEN", "COMET_API_KEY", "NGC_API_KEY")
        ),
        *(
            (name, "x")
            for name in ("dbPassword", "apiKey", "HFTOKEN", "APIKEY", "GOOGLE_APPLICATION_CREDENTIALS")
        ),
        *((name, "x") for name in ("CLIENT_SECRET", "NEPTUNE_API_TOKEN", "LICENSE_KEY", "TOKEN", "KEY")),
        ("SLACK_WEBHOOK_URL", "https://hooks.slack.com/services/T0/B0/x"),
        ("HTTP_AUTH", "me:x"),
        ("SESSION_COOKIE", "abcdef"),
        ("PYTORCH_INDEX_URL", "https://u:pw@h/simple"),
        ("TRANSFORMERS_PROXY", "http://u:pw@proxy:3128"),
        ("DB", "postgres://me:x@host/db"),
        ("EXTRA", f"--token={HF}"),
        *(("PLAIN", value) for value in (*VALUES, PEM)),
    ],
)
def test_a_variable_with_a_secret_is_found(name: str, value: str) -> None:
    assert secret_variable({"LR": "1", name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/home/me"),
        ("OLDPWD", "/home/me"),
        ("HF_TOKEN", ""),
        ("PAD_TOKEN", "<pad>"),
        ("TEXT_KEY", "text"),
        ("KEY_VALUE_HEADS", "8"),
        ("PASSES", "3"),
        ("FORWARD_PASS", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "5"),
        ("AUTHOR", "me"),
        ("MONKEY", "1"),
        ("NCCL_IB_PKEY", "0"),
        ("KEYBOARD", "de"),
        ("PATH", "/usr/bin"),
        ("PATTERN", "*.json"),
        ("FILE_PAT", "*.json"),
        ("DISPATCH", "x"),
        ("COMPASS", "north"),
        ("BYPASS", "1"),
        ("SESSION_NAME", "night"),
        ("HF_HOME", "/data/hf_cache"),
        ("MODULE", "hf_transfer"),
        ("HF_HUB_ENABLE_HF_TRANSFER", "1"),
        ("DB", "postgres://host/db"),
        ("STORE", "abfss://container@account.dfs.core.windows.net/x"),
        ("REPO", "ssh://git@github.com/a/b"),
        ("INDEX", "https://pypi.org/simple/@scope"),
        ("INDEX", "https://${TOKEN}@host/simple"),
        ("AUTH", "false"),
        ("NCCL_ALGO", "Ring"),
        ("PACKAGE", "sk-learn"),
    ],
)
def test_an_ordinary_variable_is_no_secret(name: str, value: str) -> None:
    assert secret_variable({name: value}) is None


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("--token", "hf_x"), "--token"),
        (("--hf_token=hf_x",), "--hf_token"),
        (("--key", "sk-x"), "--key"),
        (("hub.token=hf_x",), "hub.token"),
        (("+wandb.api_key=abc",), "+wandb.api_key"),
        (("--password=x",), "--password"),
        (("--db-password", "-x"), None),  # another option follows
        (("--api-key", "abc"), "--api-key"),
        (("--apiKey", "abc"), "--apiKey"),
        (("--use_auth_token", "hf_x"), "--use_auth_token"),
        (("--header", "Authorization: Bearer abcdef12"), "--header"),
        (("-H", "Authorization: Basic dXNlcjpwYXNz"), "-H"),
        (("-H", "PRIVATE-TOKEN: abcdef"), "-H"),
        (("Authorization: Bearer abcdef12",), "Authorization"),
        (("git", "clone", "https://ghp_x@github.com/r"), "https"),
        (("git", "clone", "git+https://u:p@host/r"), "git+https"),
        (("--url", "postgres://me:x@host/db"), "--url"),
        (("--url=postgres://me:x@host/db",), "--url=postgres"),
        (('{"api_key": "abcdef"}',), '{"api_key'),
        *(((value,), "***") for value in VALUES),
        *((("--anything", value), "***") for value in VALUES),
    ],
)
def test_an_argument_with_a_secret_is_found_and_not_shown(words: tuple[str, ...], shown: str | None) -> None:
    found = secret_word(["train.py", *words, "--lr", "1"])
    if shown == "***":
        assert found is not None
        assert not any(value in found for value in VALUES)
    else:
        assert found == shown


@pytest.mark.parametrize(
    "words",
    [
        ("--tokenizer", "x"),
        ("--max-tokens", "5"),
        ("--max_new_tokens=128",),
        ("--tokens_per_batch", "8192"),
        ("--pad_token", "<pad>"),
        ("--eos-token", "</s>"),
        ("--pad_token_id", "0"),
        ("--image_token", "[IMG]"),
        ("--keyboard", "de"),
        ("--hub_model_id", "me/llama"),
        ("--push_to_hub_token", "false"),
        ("--use_auth_token", "false"),
        ("--use_auth_token", "True"),
        ("--key-dim", "64"),
        ("--num_key_value_heads", "8"),
        ("--key", "text"),
        ("--key", "input_ids"),
        ("--text_key", "content"),
        ("--sort-key", "length"),
        ("--passes", "3"),
        ("--pass", "2"),
        ("--author", "me"),
        ("--monkey", "1"),
        ("--path", "/data"),
        ("--pattern", "*.json"),
        ("--session", "2"),
        ("--package", "sk-learn"),
        ("--package", "sk-learn-v2-with-a-large-data-set"),
        ("--format", "hf_checkpoint_with_config"),
        ("--prompt", "the bearer of this letter"),
        ("--prompt", "basic training of a model"),
        ("--url", "https://huggingface.co/me/model"),
        ("--token", "<image>"),
        ("--secret", "none"),
        ("--dataset", "s3://bucket/a@b"),
        ("model.hidden_size=64",),
        ("optimizer.key=adamw",),
    ],
)
def test_an_ordinary_argument_is_no_secret(words: tuple[str, ...]) -> None:
    assert secret_word(["train.py", *words, "--lr", "1"]) is None


@pytest.mark.parametrize("secret", [*VALUES, PEM])
@deterministic
@given(
    before=st.text(max_size=20).map(lambda text: text + " "),
    after=st.text(max_size=20).map(lambda t: " " + t),
)
def test_no_text_around_a_secret_hides_it(secret: str, before: str, after: str) -> None:
    assert secret not in masked(f"{before}{secret}{after}")
    assert secret not in masked(f'{before}"{secret}"{after}')
    assert secret not in masked(f"{before}x={secret},{after}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"HTTPError: 401 for token {HF}.", "HTTPError: 401 for token ***."),
        ("fatal: https://u:pw@h/r.git: 403", "fatal: https://***@h/r.git: 403"),
        ("fatal: https://u:p@ss@h/r", "fatal: https://***@h/r"),
        ("could not push to https://abc@host/r", "could not push to https://***@host/r"),
        ("password=hunter2 user=me", "password=*** user=me"),
        ('{"api_key": "abc123", "lr": 1}', '{"api_key": "***", "lr": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("GET /x?token=abcdefgh12&n=1", "GET /x?token=***&n=1"),
        ("https://hooks.slack.com/services/T0/B0/x", "https://hooks.slack.com/services/***"),
        (f"key:\n{PEM}\nend", "key:\n***\nend"),
        (PEM[:50], "***"),
        ("loss 2.5, 8192 tokens/s", None),
        ("set HF_TOKEN in the environment", None),
        ("--max-tokens 5 --pad_token <pad>", None),
        ("see https://host/a@b and me@host", None),
        ("clone ssh://git@github.com/a/b", None),
        ("", None),
    ],
)
def test_text_is_shown_without_secrets(text: str, shown: str | None) -> None:
    assert masked(text) == (text if shown is None else shown)
    assert masked(masked(text)) == masked(text)


@deterministic
@given(st.text())
def test_masking_twice_changes_nothing_more(text: str) -> None:
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    "part", ["a", "a.", "a-", "eyJ", "sk-", "://", ":", "bearer ", "password", "hf_", "=", " ", "-----BEGIN "]
)
def test_a_long_text_is_masked_in_no_time(part: str) -> None:
    """Of a pattern that looks back the time grows with the square: hours, not a second."""
    begin = time.process_time()
    masked(part * 200_000)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("name", ["--token", "token", "hub.token", "TOKEN", "Token"])
def test_a_name_counts_however_it_is_written(name: str) -> None:
    assert is_secret(name, "abcdef", is_option=True)
