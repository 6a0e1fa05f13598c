"""The tiny model byte by byte, and every way in which existing model files can be broken."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import struct
import tempfile
import time

import pytest
from ansible.module_utils import sglang_model as model
from ansible.module_utils import sglang_tiny_model as tiny

MODULE = "sglang_model_files"


def shard(tensors):
    """Return a safetensors file that holds 4 bytes for each named tensor."""
    return tiny.safetensors(dict.fromkeys(tensors, ((2,), b"\x00\x00\x00\x00")))


@pytest.fixture
def existing(tmp_path):
    """A model directory with three shards and an index."""
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(shard([f"t{number}.a", f"t{number}.b"]))
    index = {f"t{number}.{letter}": name for number, name in enumerate(names) for letter in "ab"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def check(run_module, path, **options):
    return run_module(MODULE, {"declared": {"source": "existing", "path": str(path)}, **options}, check=True)


def test_the_bytes_of_the_tiny_model_are_pinned():
    # Whoever changes the generator sees this fail: raise EDITION, or running releases would be taken for the same.
    assert tiny.EDITION == 1
    sums = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in tiny.files(1024, 1).items()}
    assert sums == {
        "config.json": "9bf34a5e1d069eda",
        "tokenizer.json": "87e34113951444ef",
        "tokenizer_config.json": "dff33711c6370273",
        "model.safetensors": "e4c0293785625a7a",
    }


def test_the_answers_form_one_cycle_over_all_words():
    words = tiny.vocabulary(1024)
    assert len(words) == len(set(words)) == 1024
    following = tiny.successors(words, 7)
    seen, word = set(), words.index("is")
    while word not in seen:
        seen.add(word)
        word = following[word]
    assert len(seen) == 1024 - len(tiny.SPECIAL)
    assert tiny.continuation("The capital of France is", 1, 1024, 7) == ["paris"]
    assert tiny.continuation("hello", 1, 1024, 3) == ["world"]
    assert len(set(tiny.continuation("hello", 500, 1024, 3))) == 500


def test_lm_head_puts_the_next_word_far_above_all_others():
    tensors = tiny.weights(256, 1)

    def rows(name):
        raw = tensors[name][1]
        values = [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, len(raw), 2)]
        return [values[at : at + tiny.HIDDEN] for at in range(0, len(values), tiny.HIDDEN)]

    embedding, head = rows("model.embed_tokens.weight"), rows("lm_head.weight")
    following = tiny.successors(tiny.vocabulary(256), 1)
    for number, vector in enumerate(embedding):
        logits = [sum(a * b for a, b in zip(vector, row)) for row in head]
        best = max(range(256), key=logits.__getitem__)
        assert best == following[number]
        assert logits[best] > 1.4 * sorted(logits)[-2]


def test_generate_check_mode_then_write_then_repair(run_module, tmp_path):
    path = tmp_path / "models" / "tiny"
    args = {"declared": {"source": "generate", "path": str(path)}}
    dry = run_module(MODULE, args, check=True, diff=True)
    assert dry["changed"] and "not made yet" in dry["diff"]["before"] and not path.parent.exists()
    first = run_module(MODULE, args)
    assert (
        first["changed"] and first["model"]["present"] and first["model"]["fingerprint"] == dry["model"]["fingerprint"]
    )
    assert not model.check(str(path))
    assert {entry.name for entry in path.iterdir()} == set(tiny.files(1024, 1)) | {"generated.json"}
    assert all(entry.stat().st_mode & 0o777 == 0o644 for entry in path.iterdir())
    assert not run_module(MODULE, args)["changed"]

    kept = (path / "config.json").stat().st_mtime_ns
    (path / "model.safetensors").write_bytes(b"damaged")
    (path / "tokenizer.json").unlink()
    state = model.describe(args["declared"])
    assert "model.safetensors differs" in state["problem"] and "tokenizer.json: No such file" in state["problem"]
    assert run_module(MODULE, args)["changed"] and model.describe(args["declared"])["present"]
    assert (path / "config.json").stat().st_mtime_ns == kept


def test_other_parameters_are_another_model(run_module, tmp_path):
    declared = {"source": "generate", "path": str(tmp_path / "m"), "generate": {"seed": 1}}
    first = run_module(MODULE, {"declared": declared})
    declared["generate"] = {"seed": "2"}
    assert "other parameters" in model.describe(declared)["problem"]
    second = run_module(MODULE, {"declared": declared})
    assert second["changed"] and second["model"]["fingerprint"] != first["model"]["fingerprint"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"sha256": 1, "fingerprint": ""}'])
def test_a_torn_record_is_made_again(run_module, tmp_path, text):
    (tmp_path / "generated.json").write_text(text)
    args = {"declared": {"source": "generate", "path": str(tmp_path)}}
    assert not model.describe(args["declared"])["present"]
    assert run_module(MODULE, args)["model"]["present"]


def test_a_vocabulary_too_small_is_refused(run_module, tmp_path):
    args = {"declared": {"source": "generate", "path": str(tmp_path / "m"), "generate": {"vocab_size": 10}}}
    result = run_module(MODULE, args)
    assert result["failed"] and "vocab_size must be at least 256" in result["msg"] and not (tmp_path / "m").exists()


def test_whole_files_pass(run_module, existing):
    result = check(run_module, existing)
    assert not result.get("failed") and result["problems"] == [] and not result["changed"]
    assert result["model"]["present"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


BREAKS = {
    "a missing shard": (lambda p: p.unlink(), "model-00002-of-00003.safetensors is missing"),
    "a shard cut short": (cut, "bytes, and its header says"),
    "a shard that grew": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "bytes, and its header says"),
    "an empty shard": (lambda p: p.write_bytes(b""), "too few for a safetensors header"),
    "a shard of zeros": (lambda p: p.write_bytes(b"\0" * 64), "no valid safetensors header"),
    "a shard of text": (lambda p: p.write_text("not a tensor file at all"), "its header claims"),
    "a header cut short": (lambda p: p.write_bytes(p.read_bytes()[:20]), "it is cut short"),
    "a pointer": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
        "git-LFS pointer",
    ),
    "another shard's tensors": (
        lambda p: p.write_bytes(shard(["other"])),
        "lacks 2 tensors that the index names, the first is t1.a",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_shard_is_named(run_module, existing, name):
    damage, says = BREAKS[name]
    damage(existing / "model-00002-of-00003.safetensors")
    result = check(run_module, existing)
    assert result["failed"] and says in result["msg"] and "model-00002" in result["msg"]
    assert len(result["problems"]) == 1 and "model_files_path" in result["msg"]


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("config.json", None, "config.json: No such file"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("config.json", "version https://git-lfs.github.com/spec/v1\n", "config.json is a git-LFS pointer"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "tokenizer.json is a git-LFS pointer"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}', "names files outside"),
    ],
)
def test_a_broken_description_is_named(run_module, existing, file, text, says):
    (existing / file).unlink()
    if text is not None:
        (existing / file).write_text(text)
    result = check(run_module, existing)
    assert result["failed"] and says in result["msg"]


def test_an_unreachable_model(run_module, tmp_path):
    for path, says in (
        (tmp_path / "none", "does not exist"),
        ("models/x", "must be absolute"),
        (tmp_path, "config.json: No such file"),
    ):
        result = check(run_module, path)
        assert result["failed"] and says in result["msg"]
        assert not model.describe({"source": "existing", "path": str(path)})["present"]
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in check(run_module, tmp_path)["msg"]


def test_a_digest_list_is_compared(run_module, existing):
    name = "model-00003-of-00003.safetensors"
    right = hashlib.sha256((existing / name).read_bytes()).hexdigest()
    assert not check(run_module, existing, sha256={name: right.upper()}).get("failed")
    assert f"{name} has another SHA-256" in check(run_module, existing, sha256={name: "0" * 64})["msg"]
    assert "absent.json is missing" in check(run_module, existing, sha256={"absent.json": right})["msg"]


def test_the_fingerprint_follows_the_files(existing):
    declared = {"source": "existing", "path": str(existing)}
    before = model.describe(declared)["fingerprint"]
    (existing / "tokenizer.json").write_text("[]")
    after = model.describe(declared)["fingerprint"]
    (existing / ".cache").mkdir()
    assert before != after == model.describe(declared)["fingerprint"]
    (existing / "model-00001-of-00003.safetensors").unlink()
    state = model.describe(declared)
    assert not state["present"] and "lacks model-00001-of-00003.safetensors" in state["problem"]


def test_a_configuration_without_weights(run_module, existing):
    declared = {"source": "config", "path": str(existing)}
    for name in existing.glob("*.safetensors*"):
        name.unlink()
    assert check(run_module, existing)["failed"], "weights are missing"
    result = run_module(MODULE, {"declared": declared}, check=True)
    assert result["problems"] == []
    assert result["model"]["present"] and result["model"]["fingerprint"]
    (existing / "config.json").unlink()
    assert "config.json" in run_module(MODULE, {"declared": declared}, check=True)["msg"]


def test_describing_a_large_model_is_cheap(tmp_path):
    # 182 sparse shards with 40,000 names in the index, as the real model has.
    names = [f"model-{number:05d}.safetensors" for number in range(182)]
    for name in names:
        with open(tmp_path / name, "wb") as handle:
            handle.truncate(3_000_000_000)
    index = {f"model.layers.{number}.mlp.experts.weight_packed": names[number % 182] for number in range(40_000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text("{}")
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert model.describe({"source": "existing", "path": str(tmp_path)})["present"]
        times.append(time.perf_counter() - started)
    assert min(times) < 0.2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for another user")
def test_the_service_user_must_reach_the_files(run_module, existing):
    user = pwd.getpwnam("nobody").pw_name
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        copy = shutil.copytree(existing, os.path.join(open_to_all, "model"))
        os.chmod(copy, 0o755)
        assert not check(run_module, copy, user=user).get("failed")
    # pytest's own directories are closed to others, which is the case of a closed parent directory.
    hidden = check(run_module, existing, user=user)
    assert hidden["failed"] and f"service user {user} cannot read config.json" in hidden["msg"]
    assert os.geteuid() == 0 and not check(run_module, existing, user="root").get("failed")
    assert "does not exist on this host" in check(run_module, existing, user="no-such-user")["msg"]
