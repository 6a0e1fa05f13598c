"""The pure parts: the launch line of a canary, the smaller model, room on GPUs, the judgement of latency."""

from __future__ import annotations

import json
import socket

import pytest
from ansible.module_utils import sglang_canary_plan as plan
from ansible.module_utils import sglang_canary_room as rooms
from ansible.module_utils.sglang_canary_live import LiveProbe
from ansible.module_utils.sglang_client import ClientError

KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {"num_hidden_layers": 61, "first_k_dense_replace": 1, "hidden_size": 7168, "vocab_size": 163840},
    "vision_config": {"depth": 27},
}


def launch(*flags, **more):
    """Return the launch of a release."""
    argv = ["/e/bin/python3", "-m", "sglang.launch_server", "--model-path", "/m", "--port", "8000", *flags]
    base = {
        "argv": argv,
        "env": {"SGLANG_DEPLOY_RELEASE": "/r/releases/x", "PYTHONPATH": "/r/releases/x/site"},
        "cwd": "/r/releases/x",
        "log": "/r/releases/x/logs/server.log",
        "endpoint": "http://127.0.0.1:8000",
        "served_model_name": "/m",
        "tp_size": 8,
        "expect": {"env": {}, "packages": {}, "args": {"mem-fraction-static": 0.88, "trust-remote-code": True}},
    }
    return {**base, **more}


def test_launch_line_keeps_the_rest_and_replaces_by_name():
    """Flags with no, one and several values stay as they are; those of the canary are there once."""
    given = launch(
        "--trust-remote-code", "--mem-fraction-static", "0.88", "--cuda-graph-bs", "1", "2", "--nccl-port", "9"
    )
    path = "/r/canary/releases/0a1b"
    made = plan.canary_launch(
        given, path, (12000, 12250), {"load-format": "dummy", "mem-fraction-static": 0.5, "x": True}
    )
    command, flags = plan.split(made["argv"])
    assert command == ["/e/bin/python3", "-m", "sglang.launch_server"]
    assert {flag: values for flag, *values in flags} == {
        "model-path": ["/m"], "trust-remote-code": [], "cuda-graph-bs": ["1", "2"], "host": ["127.0.0.1"],
        "port": ["12000"], "nccl-port": ["12250"], "load-format": ["dummy"], "mem-fraction-static": ["0.5"], "x": [],
    }  # fmt: skip
    assert len(flags) == 9
    assert made["env"]["SGLANG_DEPLOY_RELEASE"] == path and made["env"]["PYTHONPATH"] == "/r/releases/x/site"
    assert made["cwd"] == path and made["log"].startswith(path) and made["endpoint"].endswith(":12000")
    assert made["expect"]["args"] == {"trust-remote-code": True}
    assert given == launch(
        "--trust-remote-code", "--mem-fraction-static", "0.88", "--cuda-graph-bs", "1", "2", "--nccl-port", "9"
    )


def test_shadowed_model_keeps_its_served_name():
    """Without a name of its own a server goes by its path, and the path is another one."""
    made = plan.canary_launch(launch(), "/p", (1, 2), {}, model="/p/model")
    assert made["argv"][-4:] == ["--model-path", "/p/model", "--served-model-name", "/m"]


def test_paths_are_no_release_of_the_live_root():
    """The scope of a root is its own releases/."""
    path = plan.canary_path("/opt/sglang", "/opt/sglang/releases/20260101T000000Z-eagle3-fewchan-0a1b2c3d4e5f")
    assert path == "/opt/sglang/canary/releases/0a1b2c3d4e5f"
    assert not path.startswith("/opt/sglang/releases/")


def test_fewer_layers():
    """Flat, nested, with lists for each layer, with dense layers before the experts, and small already."""
    flat = {"num_hidden_layers": 6, "layer_types": list("abcdef"), "eos_token_id": [1, 2]}
    assert plan.fewer_layers(flat, 4) == {"num_hidden_layers": 4, "layer_types": list("abcd")}
    nested = plan.fewer_layers(KIMI, 4)
    assert nested == {"text_config": dict(KIMI["text_config"], num_hidden_layers=4)}
    assert plan.layers_of(dict(KIMI, **nested)) == 4
    assert plan.fewer_layers({"num_hidden_layers": 61, "first_k_dense_replace": 5}, 4) == {"num_hidden_layers": 6}
    assert plan.fewer_layers({"num_hidden_layers": 2}, 4) == {}
    assert plan.layers_of({}) == 0


def test_eagle3_needs_more_layers():
    """It taps three different ones, and names them in its configuration or counts them from the target's."""
    assert plan.layers_wanted(4, {"speculative-algorithm": "EAGLE3"}) == 8
    assert plan.layers_wanted(4, {"speculative-algorithm": "NGRAM"}) == 4
    taps = plan.eagle_taps({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "x": 1}})
    assert taps == {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "x": 1}}
    assert plan.eagle_taps({}) == {}


def test_override_of_the_release_is_kept():
    """What the variant overrides itself stays in force."""
    assert json.loads(plan.merged_override('{"rope_theta": 1}', {"num_hidden_layers": 4})) == {
        "rope_theta": 1,
        "num_hidden_layers": 4,
    }


def test_shadow_has_everything_but_the_weights(tmp_path):
    """Tokenizer and code are links, the configuration is changed, weights and their index are not there."""
    model = tmp_path / "m"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "modeling.py", "a.safetensors", "model.safetensors.index.json"):
        (model / name).write_text(json.dumps(KIMI) if name == "config.json" else name)
    plan.shadow(str(model), str(tmp_path / "s"), plan.fewer_layers(KIMI, 4))
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["config.json", "modeling.py", "tokenizer.json"]
    assert (tmp_path / "s" / "tokenizer.json").read_text() == "tokenizer.json"
    assert plan.layers_of(plan.read_config(tmp_path / "s")) == 4
    assert plan.weight_bytes(str(model)) == len("a.safetensors")


def test_ports_are_free_with_all_that_derive():
    """A base whose derived port is taken is not given."""
    draws = iter([15000, 16000])
    with socket.socket() as held:
        held.bind(("127.0.0.1", 15000 + 234))
        held.listen()
        assert plan.free_ports(lambda _low, _high: next(draws)) == (16000, 16250)


def test_weights_of_a_few_layers():
    """A share of the files, and embeddings at both ends, split over the ranks."""
    total = 595 * 2**30
    expected = (total * 4 / 61 + 2 * 2 * 163840 * 7168) / 8 / 2**20
    assert plan.weights_mb(KIMI, total, 4, 8) == pytest.approx(expected)
    assert 5000 < expected < 6000


def test_room_on_gpus_is_that_of_the_fullest():
    """The share leaves the live server what it is to keep."""
    found = rooms.room("cuda", [14000.0, 12000.0], weights=5000, overhead=6000, keep=900, tp_size=2)
    assert found["fits"] and found["needed_mb"] == 11000
    assert found["share"] == round(11100 / 12000, 3) if found["share"] < 0.9 else 0.9
    assert not rooms.room("cuda", [14000.0, 11800.0], 5000, 6000, 900, 2)["fits"]
    assert not rooms.room("cuda", [], 1, 1, 1, 1)["fits"]


def test_room_on_a_host_is_for_all_ranks():
    """Memory of a host is shared."""
    assert rooms.room("cpu", [5000.0], 100, 1000, 1000, 2)["needed_mb"] == 2200
    assert rooms.mem_available_mb() > 0


def test_gpus_of_the_server():
    """As many as it has ranks, from its first, of those that it sees."""
    free = [10.0, 20.0, 30.0, 40.0]
    assert rooms.of_server(free, launch(tp_size=2)) == [10.0, 20.0]
    seen = launch(tp_size=2, env={"CUDA_VISIBLE_DEVICES": "3,2,1"}, expect={"args": {"base-gpu-id": 1}})
    assert rooms.of_server(free, seen) == [30.0, 20.0]
    answer = rooms.free_mb("cuda", launch(tp_size=2), lambda _argv: (0, "97000\n96000\n95000\n", ""))
    assert answer == [97000.0, 96000.0]
    with pytest.raises(OSError, match="nvidia-smi ended with 9: no driver"):
        rooms.gpus_mb(lambda _argv: (9, "", "no driver"))
    assert rooms.given_back([1000.0], [900.0]) and not rooms.given_back([1000.0], [700.0])


class Server:
    """A client whose answers take no time, or fail."""

    fails = False

    def generate(self, _prompt, _tokens, _limit):
        """Answer."""
        if self.fails:
            raise ClientError("refused", "gone")


def test_latency_is_judged_against_what_it_was():
    """Median of the last few against the median before; a floor; a request that hangs; one that fails."""
    server = Server()
    probe = LiveProbe(server, factor=3, floor=0.01, interval=0.001)
    assert probe.start() and not probe.hurt()
    probe.stop()
    probe.seconds["before"] = [0.1] * 5
    assert probe.allowed == pytest.approx(0.3)
    probe.seconds["during"] = [0.2, 0.2, 9.0, 0.2, 0.2]
    assert not probe.hurt(), "one slow answer is none"
    probe.seconds["during"] += [0.4] * 3
    assert "takes 0.40 s" in probe.hurt()
    probe.seconds["before"] = [0.001] * 5
    assert probe.allowed == 0.01
    server.fails = True
    silent = LiveProbe(server, 3, 1, 0.001)
    assert not silent.start()
    assert "gone" in silent.hurt() and silent.summary()["before"]["median"] is None
