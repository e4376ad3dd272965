import pytest

from trackers import name_secrets, redaction
from trackers.redaction import redact, redacted_texts

SECRETS = """
    password db_password dbPassword DBPASSWORD password2 db_pwd passphrase secret client_secret
    credential aws_credentials api_key apikey apiKey API_KEY openai_api_key hf_token hfToken
    wandb_key AWS_SECRET_ACCESS_KEY access_token auth-token token key private.key secrets
"""
OTHERS = """
    key_dim num_keys token_count max_tokens tokenizer n_tokens keyboard monkey_patch monkey hotkey
    secretary password_length passwords_path use_token pad_token eos_token image_key keys tokens
"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_values_with_secret_names_are_masked(name):
    assert redact({name: "hunter2"}) == {name: "***"}
    assert redact({"deep": [({name: b"x"},)]}) == {"deep": [({name: "***"},)]}
    for nothing in (None, True, ""):
        assert redact({name: nothing}) == {name: nothing}


@pytest.mark.parametrize("name", OTHERS.split())
def test_values_with_other_names_are_not_masked(name):
    values = {name: "<|text_0|>", "n": {name: 3}}
    assert redact(values) is values


def test_random_looking_keys_are_masked():
    assert redact("9f8e7d6c5b4a39281706", "vendor_key") == "***"
    assert redact("vk-Q7gT1mZr9LpX4sWd0KcB", "vendor_key") == "***"
    assert redact("<|reserved_special_token_250|>", "pad_token").startswith("<|")
    assert redact("reserved_special_token_250", "pad_token").startswith("reserved")
    assert redact("observation.images.top_camera_1", "image_key").startswith("observation")


def test_the_value_of_an_option_of_a_command_line_is_masked_by_its_name():
    command = ["run", "--password", "x", "--lr", "0.1", "-api_key=y", "--token", "--other", "z"]
    masked = ["run", "--password", "***", "--lr", "0.1", "-api_key=***", "--token", "--other", "z"]
    assert redact(command) == masked
    assert redact(tuple(command)) == tuple(masked)
    plain = ["--key-dim", "8", "--tokenizer=bpe", "password"]
    assert redact(plain) is plain


@pytest.mark.parametrize("name", SECRETS.split())
def test_few_names_leave_a_doubt(name):
    value = redact({name: "x"}, certain=True)[name]
    assert value == ("x" if name in ("key", "token", "keys", "tokens") else "***")
    assert redact("vk-Q7gT1mZr9LpX4sWd0KcB", "vendor_key", certain=True) != "***"


def test_numbers_are_secrets_of_passwords_alone_and_never_metrics():
    values = {"password": 1234, "token": 3, "credentials": {"user": "me", "ids": [1, 2]}}
    hidden = {"user": "***", "ids": ["***", "***"]}
    assert redact(values) == {"password": "***", "token": 3, "credentials": hidden}
    assert redacted_texts({"password": 0.5, "api_key": "x"}) == {"password": 0.5, "api_key": "***"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgres://me:p@ss@host/db", "postgres://me:***@host/db"),
        ("redis://:pw@host:1", "redis://:***@host:1"),
        ("git+https://ghp_1@github.com/x", "git+https://***@github.com/x"),
        ("ssh://git@github.com/x", None),
        ("see https://u:p@h/x, http://v:q@i", "see https://u:***@h/x, http://v:***@i"),
        (
            "https://h/?a=1&token=t&X-Amz-Signature=s#f",
            "https://h/?a=1&token=***&X-Amz-Signature=***#f",
        ),
        ("http://h/a@b?max_tokens=5", None),
        ("me@example.com: a note", None),
    ],
)
def test_credentials_in_urls_are_masked_in_any_text(text, expected):
    assert redact({"note": text}) == {"note": expected or text}


def test_name_secrets_adds_and_excepts_names(monkeypatch):
    monkeypatch.setattr(redaction, "_named", {})
    name_secrets("PIN")
    name_secrets("primary_key", "key", secret=False)
    values = {"pin": 12, "primary_key": "a1b2c3d4e5f6g7h8i9j0k1", "key": "x", "api_key": "x"}
    assert redact(values) == {**values, "pin": "***", "api_key": "***"}
