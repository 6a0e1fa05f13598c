"""What a canary is: the launch of a release with dummy weights, few layers, little memory and ports of its own.

It lives in ``<root>/canary/releases/<name>``, so for every reader of processes it is a release of another root: a stop
of the live server does not know it, and its own stop does not know the live server.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import socket

from ansible.module_utils.sglang_proc import MARKER

FOLDER = "canary"
# Weight files stay out of the shadow of a model directory: a dummy loader reads none.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# DP attention listens on port + 233 and the six above it (SGLang: ZMQ_TCP_PORT_DELTA).
_DERIVED = (0, *range(233, 240))
# EAGLE-3 taps three different layers: the third, the middle one and the last but two.
_EAGLE_LAYERS = 8
_EAGLE_TAPS = [1, 3, 5]
_ELSEWHERE = ("nnodes", "disaggregation-mode")


def canary_root(root):
    """Return the directory that takes the place of a root for the processes of a canary."""
    return os.path.join(root, FOLDER)


def canary_path(root, release):
    """Return the run directory of a release's canary; short, for sockets of SGLang lie below it."""
    return os.path.join(canary_root(root), "releases", os.path.basename(release).rpartition("-")[2])


def split(argv):
    """Return ``(command, [[flag, value, ...]])`` of a launch line; flags without their dashes."""
    first = next((number for number, word in enumerate(argv) if word.startswith("--")), len(argv))
    flags = []
    for word in argv[first:]:
        if word.startswith("--"):
            flags.append([word[2:]])
        else:
            flags[-1].append(word)
    return argv[:first], flags


def join(command, flags):
    """Return the launch line of :func:`split`'s parts."""
    return command + [word for flag, *values in flags for word in ("--" + flag, *values)]


def not_possible(launch):
    """Return why a launch cannot be tried on one host alone, or an empty text."""
    args = (launch.get("expect") or {}).get("args") or {}
    for flag in _ELSEWHERE:
        value = args.get(flag)
        if value not in (None, False, "null", 1, "1"):
            return f"{flag} is {value}: this server is one part of several"
    return ""


def _holder(config):
    """Return ``(key or None, dict)``: where a model's configuration counts its layers; nested in multimodal ones."""
    if "num_hidden_layers" in config:
        return None, config
    for key, value in config.items():
        if isinstance(value, dict) and "num_hidden_layers" in value:
            return key, value
    return None, {}


def layers_of(config):
    """Return a model's number of layers, 0 where its configuration does not say."""
    return int(_holder(config)[1].get("num_hidden_layers") or 0)


def fewer_layers(config, layers):
    """Return what to change at the top of a model's configuration so that it has few layers.

    Lists with one entry for each layer are cut as well; at least one layer of experts is kept.

    :returns: ``{key: value}``; a nested configuration comes back whole under its key. Empty where nothing is to change.
    """
    key, inner = _holder(config)
    before = layers_of(config)
    wanted = max(layers, int(inner.get("first_k_dense_replace") or 0) + 1)
    if before <= wanted:
        return {}
    changed = {
        name: value[:wanted] for name, value in inner.items() if isinstance(value, list) and len(value) == before
    }
    changed["num_hidden_layers"] = wanted
    return {key: dict(inner, **changed)} if key else changed


def merged_override(before, changed):
    """Return the value of json-model-override-args: that of the release, if any, with the changes."""
    return json.dumps(dict(json.loads(before or "{}"), **changed))


def layers_wanted(layers, args):
    """Return how many layers a variant needs at least for its features to work at all."""
    eagle3 = str(args.get("speculative-algorithm") or "").upper() == "EAGLE3"
    return max(layers, _EAGLE_LAYERS) if eagle3 else layers


def read_config(path):
    """Return the configuration of a model directory; empty where there is none.

    :raises ValueError: it is not JSON.
    """
    name = os.path.join(path, "config.json")
    try:
        with open(name, encoding="utf-8") as handle:
            return json.load(handle)
    except OSError:
        return {}
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error


def weight_bytes(path):
    """Return the size of the weight files of a model directory in bytes."""
    try:
        names = os.listdir(path)
    except OSError:
        return 0
    return sum(os.stat(os.path.join(path, name)).st_size for name in names if name.endswith(_WEIGHTS[:-1]))


def weights_mb(config, total_bytes, layers, tp_size):
    """Return MiB of weights that one rank holds with so many layers: its share of the files, and the embeddings."""
    _key, inner = _holder(config)
    before = layers_of(config) or 1
    ends = 2 * 2 * int(inner.get("vocab_size") or 0) * int(inner.get("hidden_size") or 0)
    return (total_bytes * min(layers, before) / before + ends) / tp_size / 2**20


def shadow(model, target, changed):
    """Make a model directory of links with a changed configuration and without weights."""
    os.makedirs(target)
    for name in os.listdir(model):
        if name != "config.json" and not name.endswith(_WEIGHTS):
            os.symlink(os.path.join(model, name), os.path.join(target, name))
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as handle:
        json.dump(dict(read_config(model), **changed), handle, indent=1)


def eagle_taps(config):
    """Return what to change in the configuration of an EAGLE-3 draft model that names the layers it taps."""
    inner = config.get("eagle_config")
    if isinstance(inner, dict) and inner.get("eagle_aux_hidden_state_layer_ids"):
        return {"eagle_config": dict(inner, eagle_aux_hidden_state_layer_ids=_EAGLE_TAPS)}
    return {}


def _free(port):
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family) as probe:
                probe.bind((address, port))
        except OSError as problem:
            if family == socket.AF_INET or problem.errno == errno.EADDRINUSE:
                return False
    return True


def free_ports(draw=random.randrange):
    """Return ``(port, port of the process group)``: free with all that derive from it, and none that clients get.

    :raises OSError: none was found.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as handle:
        low = int(handle.read().split()[0])
    for _ in range(200):
        port = draw(10000, max(low, 20000) - 300)
        if all(_free(port + delta) for delta in (*_DERIVED, 250)):
            return port, port + 250
    raise OSError("no free port was found for the canary")


def canary_launch(launch, path, ports, args, model=None):
    """Return the launch of the canary.

    :param launch: content of the release's ``launch.json``.
    :param path: run directory of the canary, :func:`canary_path`.
    :param ports: ``(port, port of the process group)``.
    :param args: flags that replace those of the release; true is a bare flag.
    :param model: another model directory, or None for the release's own.
    """
    result = copy.deepcopy(launch)
    command, flags = split(launch["argv"])
    named = {flag for flag, *_ in flags}
    replaced = {"host": "127.0.0.1", "port": ports[0], "nccl-port": ports[1], **args}
    if model:
        replaced["model-path"] = model
        if "served-model-name" not in named:
            replaced["served-model-name"] = launch["served_model_name"]
    flags = [entry for entry in flags if entry[0] not in replaced]
    flags += [[flag] if value is True else [flag, str(value)] for flag, value in replaced.items()]
    result["argv"] = join(command, flags)
    result["env"] = dict(launch["env"])
    result["env"].update({MARKER: path, "TMPDIR": f"{path}/tmp", "HF_MODULES_CACHE": f"{path}/tmp/modules"})
    result.update(cwd=path, log=f"{path}/server.log", endpoint=f"http://127.0.0.1:{ports[0]}")
    asked = result["expect"].get("args") or {}
    result["expect"]["args"] = {flag: value for flag, value in asked.items() if flag not in replaced}
    return result
