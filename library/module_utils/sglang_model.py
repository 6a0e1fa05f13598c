"""Which model files are declared, whether they are there, and whether they are whole.

``declared`` is one dict, the same for the role that stages the files and for the release that serves them::

    {source: existing|config|generate, path: str, generate: {seed: int, vocab_size: int}}

``config`` is a directory without weights, for a server that makes them up (``--load-format dummy``).

``describe`` is cheap enough for every run; ``check`` reads the header of every weight file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import struct

from ansible.module_utils import sglang_tiny_model as tiny

INDEX = "model.safetensors.index.json"
# Written last into a generated model: what it was made from, and the SHA-256 of each file.
RECORD = "generated.json"
_LFS = b"version https://git-lfs.github.com/spec/"
# Text files up to this size count with their content, larger ones with name and size.
_CONTENT_LIMIT = 1 << 20
# A safetensors header of a real model has some hundred kilobytes; more than this is no header.
_HEADER_LIMIT = 100_000_000


class ModelError(Exception):
    """The model directory cannot be used; the text names the file."""


def generated(declared):
    """Return ``(vocab_size, seed)`` of a generated model; values may be text, as an operator's ``-e`` gives them."""
    options = declared.get("generate") or {}
    return int(options.get("vocab_size", 1024)), int(options.get("seed", 1))


def describe(declared):
    """Return ``{present, path, fingerprint, problem}`` of the declared model.

    ``fingerprint`` of a generated model is known before its files exist. That of existing files covers the
    configuration, the index, the tokenizer and the names and sizes of the weights; it is null where they cannot be
    read. ``problem`` says why ``present`` is false.
    """
    path = declared["path"]
    if declared["source"] == "generate":
        problems = damaged(declared)
        return {
            "present": not problems,
            "path": path,
            "fingerprint": tiny.fingerprint(*generated(declared)),
            "problem": "; ".join(problems) or None,
        }
    state = {"present": False, "path": path, "fingerprint": None, "problem": None}
    try:
        named = [] if declared["source"] == "config" else _named_in_index(path)
        named = named or weight_files(path, declared["source"] != "config")
        missing = [name for name in named if not os.path.isfile(os.path.join(path, name))]
        if missing:
            state["problem"] = f"{path} lacks {', '.join(missing)}"
        else:
            state.update(present=True, fingerprint=_fingerprint(path))
    except ModelError as error:
        state["problem"] = str(error)
    except OSError as error:
        state["problem"] = f"{error.filename}: {error.strerror}"
    return state


def read_json(path):
    """Return the object in a JSON file.

    :raises ModelError: it is absent, unreadable, a git-LFS pointer or not a JSON object.
    """
    try:
        with open(path, "rb") as handle:
            raw = handle.read()
        if raw.startswith(_LFS):
            raise ModelError(f"{path} is a git-LFS pointer, not the file; run git lfs pull")
        value = json.loads(raw)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _named_in_index(path):
    """Return the shards that an index names, empty where it has none.

    The index of a large model has 20 MB: parsing it takes a second, finding the names a tenth of that. :func:`check`
    reads it in full.
    """
    if not os.path.isfile(os.path.join(path, "config.json")):
        return []
    try:
        with open(os.path.join(path, INDEX), "rb") as handle:
            return sorted({name.decode() for name in re.findall(rb'"([\w.-]+\.safetensors)"', handle.read())})
    except FileNotFoundError:
        return []


def weight_map(path):
    """Return ``{tensor: file}`` of the index of a model directory, None where it has no index.

    :raises ModelError: the index is broken or leads out of the directory.
    """
    index = os.path.join(path, INDEX)
    if not os.path.exists(index):
        return None
    tensors = read_json(index).get("weight_map")
    if not isinstance(tensors, dict) or not tensors:
        raise ModelError(f"{index} has no weight_map")
    outside = sorted({str(name) for name in tensors.values() if os.path.basename(str(name)) != name})
    if outside:
        raise ModelError(f"{index} names files outside the model directory: {', '.join(outside)}")
    return tensors


def weight_files(path, weights=True):
    """Return the sorted names of the weight files that a model directory must hold: none without ``weights``.

    :raises ModelError: the directory or config.json is unusable, or there are no weights.
    """
    if not os.path.isabs(path):
        raise ModelError(f"the model path must be absolute, not {path!r}")
    if not os.path.isdir(path):
        raise ModelError(f"{path} is not a directory" if os.path.exists(path) else f"{path} does not exist")
    read_json(os.path.join(path, "config.json"))
    if not weights:
        return []
    tensors = weight_map(path)
    if tensors is not None:
        return sorted(set(tensors.values()))
    names = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    names = names or sorted(
        name for name in os.listdir(path) if name.startswith("pytorch_model") and name.endswith(".bin")
    )
    if not names:
        raise ModelError(f"{path} holds no weights: neither {INDEX} nor a .safetensors file")
    return names


def _fingerprint(path):
    parts = []
    for name in sorted(os.listdir(path)):
        full = os.path.join(path, name)
        if name.startswith(".") or not os.path.isfile(full):
            continue
        size = os.path.getsize(full)
        content = None
        if size <= _CONTENT_LIMIT or name == INDEX:
            content = sha256(full)
        parts.append([name, size, content])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def sha256(path):
    """Return the SHA-256 of a file in hexadecimal."""
    total = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 22), b""):
            total.update(block)
    return total.hexdigest()


def check_shard(path):
    """Return ``(problem or None, tensor names)`` of one weight file: whether it is there and whole."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as handle:
            start = handle.read(len(_LFS))
            if start == _LFS:
                return "is a git-LFS pointer, not the file; run git lfs pull", set()
            if not path.endswith(".safetensors"):
                return (None if size else "is empty"), set()
            if size < 8:
                return f"has {size} bytes, too few for a safetensors header", set()
            length = struct.unpack("<Q", start[:8])[0]
            if length > min(_HEADER_LIMIT, size - 8):
                return (
                    f"has {size} bytes, and its header claims {length}: it is cut short or no safetensors file",
                    set(),
                )
            handle.seek(8)
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except FileNotFoundError:
        return "is missing", set()
    except OSError as error:
        return f"cannot be read: {error.strerror}", set()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "has no valid safetensors header", set()
    if size != 8 + length + end:
        return f"has {size} bytes, and its header says {8 + length + end}", set(header)
    return None, set(header)


def check(path, digests=None, user=None, weights=True):
    """Return every problem of existing model files as texts that name the file; an empty list means they can be
    served.

    :param path: absolute path of the model directory.
    :param digests: ``{file name: SHA-256}``; each file named there is read in full.
    :param user: name of the service user that must be able to read all of it, None where that is not asked.
    :param weights: whether weights must be there.
    """
    try:
        names = weight_files(path, weights)
        tensors = weight_map(path) if weights else None
    except ModelError as error:
        return [str(error)]
    except OSError as error:
        return [f"{error.filename}: {error.strerror}"]
    problems = []
    expected = {}
    for tensor, name in (tensors or {}).items():
        expected.setdefault(name, set()).add(tensor)
    for name in names:
        problem, held = check_shard(os.path.join(path, name))
        if problem:
            problems.append(f"{name} {problem}")
        elif name.endswith(".safetensors"):
            lacking = sorted(expected.get(name, set()) - held)
            if lacking:
                problems.append(f"{name} lacks {len(lacking)} tensors that the index names, the first is {lacking[0]}")
    for name in sorted(os.listdir(path)):
        full = os.path.join(path, name)
        if name not in names and os.path.isfile(full) and os.path.getsize(full) < 1024:
            with contextlib.suppress(OSError), open(full, "rb") as handle:
                if handle.read(len(_LFS)) == _LFS:
                    problems.append(f"{name} is a git-LFS pointer, not the file; run git lfs pull")
    for name, wanted in sorted((digests or {}).items()):
        full = os.path.join(path, name)
        if not os.path.isfile(full):
            problems.append(f"{name} is missing")
        elif sha256(full) != wanted.lower():
            problems.append(f"{name} has another SHA-256 than the digest list says")
    if user:
        hidden = unreadable(path, ["config.json"] + names, user)
        if hidden:
            problems.append(f"the service user {user} cannot read {', '.join(hidden)}")
    return problems


def unreadable(directory, names, user):
    """Return those of the named files that a user cannot read, whatever the reason: mode, ACL, a closed parent
    directory.

    As root this process becomes the user for the moment of the question. Without root only the own user can be asked
    for.

    :raises KeyError: there is no such user.
    """
    hidden = []
    with acting_as(pwd.getpwnam(user)):
        for name in names:
            try:
                os.close(os.open(os.path.join(directory, name), os.O_RDONLY))
            except OSError:
                hidden.append(name)
    return hidden


@contextlib.contextmanager
def acting_as(entry):
    """Take the effective identity of a password entry; a process that is not root keeps its own."""
    if os.geteuid() != 0 or entry.pw_uid == 0:
        yield
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(entry.pw_name, entry.pw_gid))
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def damaged(declared):
    """Return what is wrong with a generated model directory, judged by its record; empty where it is whole."""
    path = declared["path"]
    record = os.path.join(path, RECORD)
    if not os.path.exists(record):
        return [f"{path} is not complete" if os.path.isdir(path) else f"{path} is not made yet"]
    try:
        recorded = read_json(record)
        digests = dict(recorded["sha256"])
        if recorded["fingerprint"] != tiny.fingerprint(*generated(declared)):
            return [f"{path} holds a model of other parameters"]
    except ModelError as error:
        return [str(error)]
    except (KeyError, TypeError, ValueError) as error:
        return [f"{record} is no record of a generated model: {error!r}"]
    problems = []
    for name, wanted in sorted(digests.items()):
        try:
            if sha256(os.path.join(path, name)) != wanted:
                problems.append(f"{os.path.join(path, name)} differs from its digest")
        except OSError as error:
            problems.append(f"{os.path.join(path, name)}: {error.strerror}")
    return problems


def generate(declared):
    """Write the generated model; a file that is whole already keeps its bytes and its time. The record goes last.

    :raises OSError: a file cannot be written.
    """
    path = declared["path"]
    vocab_size, seed = generated(declared)
    made = tiny.files(vocab_size, seed)
    os.makedirs(path, mode=0o755, exist_ok=True)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in made.items()}
    record = {
        "edition": tiny.EDITION,
        "vocab_size": vocab_size,
        "seed": seed,
        "fingerprint": tiny.fingerprint(vocab_size, seed),
        "sha256": digests,
    }
    made[RECORD] = (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
    for name, content in made.items():
        full = os.path.join(path, name)
        if os.path.isfile(full) and sha256(full) == hashlib.sha256(content).hexdigest():
            continue
        draft = full + ".new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(descriptor, "wb") as handle:
            os.fchmod(descriptor, 0o644)
            handle.write(content)
        os.replace(draft, full)
