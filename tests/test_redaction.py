"""Tests that redaction finds secrets by name and by value, and leaves ordinary training options alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.redaction import is_secret, masked, secret_variable, secret_word
from tests.samples import deterministic

# The parts are joined here, so that no scanner takes these for real secrets.
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
        *(
            (f"{name}_KEY", name.lower())
            for name in ("LOSS", "JSON", "MODEL", "CAPTION", "STATE_DICT", "IMAGE")
        ),
        ("CACHE_KEY_PREFIX", "x"),
        ("TRAIN_TOKEN", "100000"),
        ("SESSION_ID", "5555"),
        ("NUM_PASS", "1000"),
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
def test_finds_and_hides_a_secret_argument(words: tuple[str, ...], shown: str | None) -> None:
    secret = secret_word(["train.py", *words, "--lr", "1"])
    if shown == "***":
        assert secret is not None
        assert not any(value in secret for value in VALUES)
    else:
        assert secret == shown


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


ORDINARY = """
transformers --tokenizer_name gpt2
transformers --hub_model_id me/llama
transformers --hub_strategy every_save
transformers --hub_token $HF_TOKEN
transformers --use_auth_token True
transformers --forced_bos_token en_XX
transformers --word_delimiter_token |
transformers --unk_token [UNK]
transformers --pad_token <pad>
transformers --max_seq_length 1024
transformers --mlm_probability 0.15
transformers --text_column article
transformers --suppress_tokens 220,50256
transformers --include_num_input_tokens_seen non_padding
transformers --report_to wandb
transformers --metric_for_best_model eval_loss
transformers --optim adamw_torch_fused
transformers --optim_args betas=0.9
trl --eos_token <|im_end|>
trl --stop_token eos
trl --stop_token_id 128001
trl --missing_eos_penalty 1.0
trl --dataset_text_field text
trl --max_completion_length 256
trl --chat_template_path Qwen/Qwen3-0.6B
trl --average_tokens_across_devices false
trl --vllm_server_host 0.0.0.0
diffusers --placeholder_token sks
diffusers --placeholder_token <cat-toy>
diffusers --initializer_token toy
diffusers --initializer_token ktn+pll+ucd
diffusers --modifier_token <new1>+<new2>
diffusers --token_abstraction TOK
diffusers --trigger_token TOK
diffusers --num_new_tokens_per_abstraction 2
diffusers --instance_prompt photo
diffusers --caption_column text
peft --num_virtual_tokens 20
peft --num_transformer_submodules 1
peft --prompt_tuning_init TEXT
peft --modules_to_save embed_tokens
peft --trainable_token_indices 1,2,3
peft --target_modules q_proj,k_proj
nanotron tokens.sequence_length=4096
nanotron tokens.micro_batch_size=2
nanotron data_stages.0.data.dataset.text_column_name=text
nanotron tokenizer.tokenizer_name_or_path=gpt2
torchtitan --training.seq_len=8192
torchtitan --training.mixed_precision_param=bfloat16
torchtitan --checkpoint.exclude_from_loading=lr_scheduler,dataloader
torchtitan --metrics.enable_tensorboard=true
open_clip --csv-img-key filepath
open_clip --csv-caption-key title
open_clip --csv-separator ,
open_clip --dataset-type webdataset
open_clip --wandb-project-name clip
open_clip --train-num-samples 10968539
timm --input-key jpg;png;webp
timm --target-key cls
timm --input-img-mode RGB
timm --class-map map.txt
timm --reg-tokens 4
timm --wandb-resume-id 3kx9d2f1
other --thinking_token think
other --vision_token 1024
other --vq_token 8192
other --train_token 100000000
other --target_token 300B
other --warmup_tokens 375e6
other --user_tokens 2048
other --session_tokens 4096
other --session_id 12345
other --user_token user
other --auth basic
other --pass train
other --first_pass 10000
other --model_key Conv2dForLlama3
other --cache_key_prefix llama3-8b-v2
other --sentinel_token extra_id_0
other --file_pat shard-*.tar
""".strip().splitlines()


@pytest.mark.parametrize("row", ORDINARY)
def test_an_option_of_a_library_is_no_secret(row: str) -> None:
    words = row.split()[1:]
    assert secret_word(["train.py", *words, "--lr", "1"]) is None
    name, value = words if len(words) == 2 else words[0].split("=")
    variable = name.lstrip("-").replace("-", "_").replace(".", "_").upper()
    if variable not in ("HUB_TOKEN", "PASS"):
        assert secret_variable({variable: value}) is None


def test_sentence_starting_with_basic_is_no_secret() -> None:
    assert secret_word(["--description", "basic transformer2d"]) is None
    assert secret_word(["--description", "Basic ConvTransformer"]) is None
    assert secret_word(["--header", "Basic bWU6aHVudGVyMg=="]) is not None
    assert masked("sent basic bWU6aHVudGVyMg== to host") == "sent *** to host"


DRAWN = (
    "aB3dE5gH7jK9mN1pQ3",
    "0123456789abcdef0123456789abcdef01234567",
    "550e8400-e29b-41d4-a716-446655440000",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "q7x9v2k4m1z8",
    "aBcDeFgHiJkLmN",
    "hf_x",
    "sk-x",
)


@pytest.mark.parametrize("value", DRAWN)
@pytest.mark.parametrize(
    "name",
    ["trigger_token", "user_tokens", "session_id", "auth", "pass", "model_key", "token_2", "bot.token"],
)
def test_a_value_that_was_drawn_is_a_secret(name: str, value: str) -> None:
    assert secret_word([f"--{name}", value]) == f"--{name}"
    assert secret_word([f"{name}={value}"]) == f"{name}"
    variable = name.replace(".", "_").upper()
    assert secret_variable({variable: value}) == variable


@pytest.mark.parametrize(
    "name",
    [
        *("hf_token", "hub_token", "token", "hub.token", "api_key", "apikey", "secret_key", "access_token"),
        *(
            "wandb_api_key",
            "aws_session_token",
            "slack_bot_token",
            "github_pat",
            "gitlab_token",
            "auth_token",
        ),
        *("db_password", "passwd", "mysql_pwd", "db_pass", "client_secret", "license_key", "session_cookie"),
        *("neptune_api_token", "comet_api_key", "http_auth", "private_key", "jwt", "sentry_dsn", "pat"),
    ],
)
def test_name_known_to_hold_secrets_is_enough(name: str) -> None:
    assert secret_word([f"--{name}", "toy"]) == f"--{name}"
    variable = name.replace(".", "_").upper()
    assert secret_variable({variable: "toy"}) == variable


@pytest.mark.parametrize("name", ["TRIGGER_TOKEN", "LOSS_KEY", "SESSION_ID", "FIRST_PASS"])
def test_what_is_only_recorded_has_a_wider_net(name: str) -> None:
    assert is_secret(name, "toy")
    assert not is_secret(name, "toy", is_declared=True)


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
def test_a_secret_after_a_long_text_is_found(part: str) -> None:
    """If the time grew with the square of the length, the test would take hours, and pytest would end it."""
    assert HF not in masked(f"{part * 200_000} {HF}")


@pytest.mark.parametrize("name", ["--token", "token", "hub.token", "TOKEN", "Token"])
def test_a_name_counts_however_it_is_written(name: str) -> None:
    assert is_secret(name, "abcdef", is_declared=True)
