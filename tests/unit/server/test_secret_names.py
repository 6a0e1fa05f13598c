"""Which names are those of secrets, for everything that shows or records a value."""

from __future__ import annotations

import json
import pathlib
import types

import pytest
from ansible.module_utils.sglang_api_key import API_KEY_ENV, key_for, names_secret

ROOT = pathlib.Path(__file__).parents[3]
DATA = ROOT / "plugins" / "data"


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN MYTOKEN TOKEN token hf-token access_token AWS_SESSION_TOKEN "
    "AWS_SECRET_ACCESS_KEY DB_PASSWD DB_PASSWORD DB_PASS DB_PWD proxy_password KEY_PASSPHRASE SSH_PRIVATE_KEY "
    "STORAGE_ACCOUNT_KEY "
    "OPENAI_API_KEY OPENAI_APIKEY API_KEYS OPENAI_API_KEY_2 apiKey api-key api_key admin-api-key ssl-keyfile-password "
    "CLIENT_SECRET client_secret_2 Authorization NCCL_NET_SECRET".split(),
)
def test_a_secret(name):
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    "input_tokens output_tokens output_tok_s tokens_per_second cpu_us_per_token time_to_first_token pad_token "
    "eos_token eos_token_id tokenizer tokenizer-path skip-tokenizer-init max-total-tokens TOKENIZERS_PARALLELISM "
    "hf_tokenizer "
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION key keys sort_key CACHE_KEY PUBLIC_KEY PWD OLDPWD PATH passed bypass "
    "SGLANG_DEPLOY_API_KEY_FILE HF_TOKEN_PATH ssl-keyfile author monkey".split(),
)
def test_no_secret(name):
    assert not names_secret(name)


def test_of_all_that_nccl_and_sglang_know_three_flags_are_secrets():
    flags = json.loads((DATA / "sglang_flags.json").read_text())["flags"]
    variables = json.dumps(json.loads((DATA / "nccl_variables.json").read_text())).split('"')
    assert {name for name in flags if names_secret(name)} == {"api-key", "admin-api-key", "ssl-keyfile-password"}
    nccl = [name for name in variables if name.startswith("NCCL_")]
    assert len(nccl) > 50 and not any(names_secret(name) for name in nccl)
    known = json.loads((ROOT / "tests/fake_sglang/sglang/server_args.json").read_text())
    assert {name for name in known if names_secret(name)} <= {"api_key", "admin_api_key", "ssl_keyfile_password"}


@pytest.mark.parametrize(("text", "key"), [("sk-1234\n", "sk-1234"), ("\n", None)])
def test_key_of_a_file_is_hidden_and_an_empty_one_is_none(tmp_path, text, key):
    """An empty secret would blot out the whole output."""
    (tmp_path / "key").write_text(text)
    module = types.SimpleNamespace(params={"api_key": None}, no_log_values=set())
    assert key_for(module, {"env": {API_KEY_ENV: str(tmp_path / "key")}}) == key
    assert module.no_log_values == ({key} if key else set())
