"""Every rule, with what it refuses and what it lets pass."""

from __future__ import annotations

import pytest
from ansible.module_utils.sglang_findings import LEVELS
from ansible.module_utils.sglang_lint import RULES

SM120 = ("sm120_allreduce_fusion", "flashinfer_sm120_gate")
KIMI = {"model_path": "/models/Kimi-K2.5"}
GATE = {
    "name": "flashinfer_sm120_gate",
    "package": "flashinfer",
    "experimental": True,
    "evidence": ["Nobody has published TP8."],
    "families": [{"versions": "<0.6.17", "files": []}, {"versions": ">=0.6.17,<0.8", "upstream": True, "files": []}],
}
EAGLE3 = {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "/models/draft"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
OFF = {"disable-custom-all-reduce": True}

# rule: ([refused], [passed], what the refusal must name)
CASES = {
    "nccl-unknown": (
        [{"nccl": {"NCCL_MIN_NCHANNEL": "1"}}, {"nccl": {"NCCL_SHM_MEMCPY_MODE": "1"}, "engine": "0.5.23"}],
        [{"nccl": {"NCCL_MIN_NCHANNELS": "1"}}, {"nccl": {"NCCL_SHM_MEMCPY_MODE": "1"}, "engine": "0.5.9"}],
        "nccl.NCCL_",
    ),
    "nccl-value": (
        [
            {"nccl": {"NCCL_PROTO": ""}},
            {"nccl": {"NCCL_PROTO": "LL64"}},
            {"nccl": {"NCCL_ALGO": "Ring;Tree"}},
            {"nccl": {"NCCL_ALGO": "ring;all_reduce:tree"}},
            {"nccl": {"NCCL_P2P_DISABLE": "true"}},
            {"nccl": {"NCCL_IB_DISABLE": "yes"}},
            {"nccl": {"NCCL_MIN_NCHANNELS": "1_0"}},
        ],
        [
            {"nccl": {"NCCL_PROTO": "ll,simple"}},
            {"nccl": {"NCCL_ALGO": "ring;AllReduce:^nvls"}},
            {"nccl": {"NCCL_P2P_DISABLE": "1"}},
            {"nccl": {"NCCL_IB_DISABLE": "1"}},
        ],
        "nccl.NCCL_",
    ),
    "nccl-level-case": (
        [
            {"nccl": {"NCCL_P2P_LEVEL": "sys"}},
            {"nccl": {"NCCL_P2P_LEVEL": "SOC"}},
            {"nccl": {"NCCL_NET_GDR_LEVEL": "Phb"}},
            {"nccl": {"NCCL_P2P_LEVEL": "\u00b2"}},
        ],
        [{"nccl": {"NCCL_P2P_LEVEL": "SYS"}}, {"nccl": {"NCCL_P2P_LEVEL": "4"}}],
        "LEVEL",
    ),
    "nccl-level-number": ([{"nccl": {"NCCL_P2P_LEVEL": "1"}}], [{"nccl": {"NCCL_P2P_LEVEL": "PIX"}}], "meaning PIX"),
    "nccl-algo-collective": (
        [
            {"nccl": {"NCCL_ALGO": "Tree"}},
            {"nccl": {"NCCL_ALGO": "tree"}, "device": "cpu"},
            {"nccl": {"NCCL_ALGO": "NVLSTree"}},
            {"nccl": {"NCCL_ALGO": "NVLS"}},
            {"nccl": {"NCCL_ALGO": "^ring"}},
            {"nccl": {"NCCL_ALGO": "ring;allgather:tree"}},
            {"nccl": {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"}, "launch": {"nccl_version": "2.31.1"}},
            {"nccl": {"NCCL_ALGO": "ring;allreduce:nvls", "NCCL_PROTO": "LL"}, "launch": {"interconnect": "nvlink"}},
        ],
        [
            {"nccl": {"NCCL_ALGO": "Ring"}},
            {"nccl": {"NCCL_ALGO": "ring;allreduce:tree", "NCCL_PROTO": "LL"}},
            {"nccl": {"NCCL_ALGO": "allreduce:tree;allgather:ring"}},
            {"nccl": {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL"}, "launch": {"nccl_version": "2.30.7"}},
            {
                "nccl": {"NCCL_ALGO": "ring,tree;allreduce:tree", "NCCL_PROTO": "LL"},
                "launch": {"nccl_version": "2.31.1"},
            },
            {"nccl": {"NCCL_ALGO": "ring;allreduce:nvls"}, "launch": {"interconnect": "nvlink"}},
            {"nccl": {}},
        ],
        "nccl.NCCL_ALGO",
    ),
    "nccl-deprecated": (
        [{"nccl": {"NCCL_MIN_NCHANNELS": "1"}}],
        [{"nccl": {"NCCL_MIN_CTAS": "1"}}],
        "NCCL_MIN_CTAS",
    ),
    "nccl-deprecated-both": (
        [{"nccl": {"NCCL_MAX_NCHANNELS": "2", "NCCL_MAX_CTAS": "8"}}],
        [{"nccl": {"NCCL_MAX_NCHANNELS": "2", "NCCL_MIN_CTAS": "1"}}],
        "the stricter wins, 2",
    ),
    "nccl-channels": (
        [
            {"nccl": {"NCCL_MIN_NCHANNELS": "0"}},
            {"nccl": {"NCCL_MAX_CTAS": "65"}},
            {"nccl": {"NCCL_MIN_CTAS": "8", "NCCL_MAX_NCHANNELS": "2"}},
        ],
        [{"nccl": {"NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "64"}}],
        "nccl.NCCL_M",
    ),
    "nccl-nthreads": (
        [{"nccl": {"NCCL_NTHREADS": "96"}}, {"nccl": {"NCCL_NTHREADS": "1024"}}],
        [{"nccl": {"NCCL_NTHREADS": "64"}}, {"nccl": {"NCCL_NTHREADS": "512"}}],
        "nccl.NCCL_NTHREADS",
    ),
    "nccl-buffsize": (
        [{"nccl": {"NCCL_BUFFSIZE": "100000"}}, {"nccl": {"NCCL_BUFFSIZE": "1024"}}],
        [{"nccl": {"NCCL_BUFFSIZE": "131072"}}],
        "nccl.NCCL_BUFFSIZE",
    ),
    "nccl-buffsize-proto": (
        [{"nccl": {"NCCL_BUFFSIZE": "131072", "NCCL_PROTO": "LL"}}],
        [{"nccl": {"NCCL_BUFFSIZE": "131072"}}, {"nccl": {"NCCL_BUFFSIZE": "131072", "NCCL_PROTO": "LL,Simple"}}],
        "nccl.NCCL_BUFFSIZE",
    ),
    "nccl-buffsize-memory": (
        [
            {"nccl": {"NCCL_BUFFSIZE": "268435456"}, "args": {"mem-fraction-static": 0.94}},
            {"nccl": {"NCCL_BUFFSIZE": "134217728", "NCCL_MAX_CTAS": "64"}},
            {"nccl": {"NCCL_BUFFSIZE": "67108864"}, "launch": {"gpu_memory_gib": 24}},
        ],
        [
            {"nccl": {"NCCL_BUFFSIZE": "67108864"}},
            {"nccl": {"NCCL_BUFFSIZE": "268435456", "NCCL_MAX_CTAS": "2"}},
            {"nccl": {"NCCL_BUFFSIZE": "268435456"}, "args": {"mem-fraction-static": 0.94}, "device": "cpu"},
        ],
        "nccl.NCCL_BUFFSIZE",
    ),
    "nccl-ll128-pcie": (
        [
            {"nccl": {"NCCL_PROTO": "LL128"}},
            {"nccl": {"NCCL_PROTO": "Simple;allreduce:LL128"}},
            {"nccl": {"NCCL_PROTO": "^LL,Simple"}},
        ],
        [
            {"nccl": {"NCCL_PROTO": "LL"}},
            {"nccl": {"NCCL_PROTO": "^LL128"}},
            {"nccl": {"NCCL_PROTO": "LL128"}, "launch": {"interconnect": "nvlink"}},
            {"nccl": {"NCCL_PROTO": "LL128"}, "device": "cpu"},
        ],
        "nccl.NCCL_PROTO",
    ),
    "nccl-ll128-list": (
        [
            {"nccl": {"NCCL_PROTO": "LL,LL128,Simple"}},
            {"nccl": {"NCCL_PROTO": "^LL"}},
            {"nccl": {"NCCL_PROTO": "LL;allreduce:^Simple"}},
        ],
        [
            {"nccl": {"NCCL_PROTO": "LL,Simple"}},
            {"nccl": {"NCCL_PROTO": "^LL128"}},
            {"nccl": {"NCCL_PROTO": "allreduce:LL"}},
        ],
        "nccl.NCCL_PROTO",
    ),
    "nccl-p2p-both": (
        [{"nccl": {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"}}],
        [{"nccl": {"NCCL_P2P_DISABLE": "1"}}, {"nccl": {"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "SYS"}}],
        "nccl.NCCL_P2P_LEVEL",
    ),
    "nccl-p2p-off-fewchan": (
        [{"nccl": {"NCCL_P2P_DISABLE": "1", "NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "131072"}}],
        [{"nccl": {"NCCL_P2P_DISABLE": "1", "NCCL_MAX_NCHANNELS": "32", "NCCL_BUFFSIZE": "33554432"}}],
        "nccl.NCCL_P2P_DISABLE",
    ),
    "nccl-graph-ranks": (
        [{"nccl": {"NCCL_GRAPH_FILE": "eight.xml"}, "tp": 4}, {"nccl": {"NCCL_GRAPH_FILE": "broken.xml"}}],
        [{"nccl": {"NCCL_GRAPH_FILE": "eight.xml"}, "tp": 8}, {"nccl": {"NCCL_GRAPH_FILE": "absent.xml"}}],
        "nccl.NCCL_GRAPH_FILE",
    ),
    "nccl-graph-unseen": (
        [{"nccl": {"NCCL_GRAPH_FILE": "absent.xml"}}],
        [{"nccl": {"NCCL_GRAPH_FILE": "eight.xml"}}, {"nccl": {}}],
        "nccl.NCCL_GRAPH_FILE",
    ),
    "nccl-graph-memory": (
        [{"nccl": {"NCCL_GRAPH_FILE": "eight.xml"}, "args": {"mem-fraction-static": "0.94"}}],
        [{"nccl": {"NCCL_GRAPH_FILE": "eight.xml"}, "args": {"mem-fraction-static": 0.93}}],
        "nccl.NCCL_GRAPH_FILE",
    ),
    "flag-unknown": (
        [
            {"args": {"trust-remot-code": True}},
            {"args": {"tp": 8}},
            {"args": {"enable-nan-detection": True}},
            {"args": {"speculative-eagle-top-k": 1}},
        ],
        [{"args": {"trust-remote-code": True}}, {"args": {"enable-nan-detection": True}, "engine": "0.5.9"}],
        "--",
    ),
    "flag-renamed": (
        [
            {"args": {"cuda-graph-max-bs": 8}, "engine": "0.5.20"},
            {"args": {"flashinfer-allreduce-fusion-backend": "auto"}, "engine": "0.5.9"},
        ],
        [
            {"args": {"cuda-graph-max-bs": 8}, "engine": "0.5.18"},
            {"args": {"cuda-graph-max-bs-decode": 8}, "engine": "0.5.20"},
            {"args": {"flashinfer-allreduce-fusion-backend": "auto"}, "engine": "0.5.14"},
        ],
        "write",
    ),
    "flag-value": (
        [
            {"args": {"mem-fraction-static": "much"}},
            {"args": {"trust-remote-code": "maybe"}},
            {"args": {"chunked-prefill-size": True}},
            {"args": {"attention-backend": "flash"}},
            {"args": {"chunked-prefill-size": ["1", "2"]}},
            {"args": {"flashinfer-allreduce-fusion-backend": "cutedsl"}, "engine": "0.5.20"},
        ],
        [
            {"args": {"mem-fraction-static": "0.88"}},
            {"args": {"trust-remote-code": "false"}},
            {"args": {"chunked-prefill-size": "8192"}},
            {"args": {"attention-backend": "flashinfer"}},
            {"args": {"attention-backend": False}},
            {"args": {"flashinfer-allreduce-fusion-backend": "cutedsl"}, "engine": "0.5.21"},
        ],
        "args.",
    ),
    "flag-deprecated": (
        [{"args": {"enable-flashinfer-allreduce-fusion": True}, "engine": "0.5.14"}],
        [
            {"args": {"enable-flashinfer-allreduce-fusion": True}, "engine": "0.5.13.post1"},
            {"args": {"enable-flashinfer-allreduce-fusion": False}, "engine": "0.5.14"},
        ],
        "write flashinfer-allreduce-fusion-backend",
    ),
    "flag-ignored": (
        [{"args": {"num-continuous-decode-steps": 4}}],
        [{"args": {"num-continuous-decode-steps": None}}, {"args": {"enable-metrics": True}}],
        "--num-continuous-decode-steps",
    ),
    "flag-managed": (
        [{"args": {"port": 8000}}, {"args": {"tensor-parallel-size": 8}}, {"args": {"tp": 8}}],
        [{"args": {"port": None}}, {"args": {"api-key": "hunter2"}}, {"args": {"trust-remote-code": True}}],
        "use sglang_server_",
    ),
    "flag-secret": ([{"args": {"api-key": "hunter2"}}], [{"args": {"enable-metrics": True}}], "args.api-key"),
    "flag-twice": (
        [{"args": {"speculative-draft-model-path": "/a", "speculative-draft-model": "/b"}}],
        [{"args": {"speculative-draft-model-path": "/a"}}],
        "same flag",
    ),
    "engine-range": ([{"engines": ">=0.5.22"}], [{"engines": ">=0.5.9,>=0.5.20"}, {"engines": ""}], "0.5.20"),
    "engine-unknown": ([{"engine": "0.5.99"}, {"engine": "0.4.1"}], [{"engine": "0.5.9"}], "table of releases"),
    "engine-model": (
        [{"engine": "0.5.8.post1", "launch": KIMI}],
        [{"engine": "0.5.9", "launch": KIMI}, {"engine": "0.5.8.post1", "launch": {"model_path": "/models/tiny"}}],
        "Kimi-K2.5",
    ),
    "env-overwritten": (
        [
            {"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}},
            {"env": {"CUDA_MODULE_LOADING": "LAZY"}, "engine": "0.5.9"},
            {"nccl": {"NCCL_ALGO": "Ring"}, "args": {"enable-deterministic-inference": "true"}},
            {"nccl": {"NCCL_MAX_NCHANNELS": "2"}, "args": {"enable-deterministic-inference": True}, "engine": "0.5.18"},
        ],
        [
            {"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}},
            {"env": {"CUDA_MODULE_LOADING": "LAZY"}, "engine": "0.5.19"},
            {"nccl": {"NCCL_ALGO": "Ring"}, "args": {"enable-deterministic-inference": "false"}},
            {"nccl": {"NCCL_MAX_NCHANNELS": "2"}, "args": {"enable-deterministic-inference": True}, "engine": "0.5.17"},
        ],
        "overwritten",
    ),
    "env-defaulted": (
        [
            {"nccl": {"NCCL_CUMEM_ENABLE": "1"}},
            {"nccl": {"NCCL_GRAPH_REGISTER": "1"}, "engine": "0.5.20"},
        ],
        [{"nccl": {"NCCL_CUMEM_ENABLE": "0"}}, {"nccl": {"NCCL_GRAPH_REGISTER": "1"}, "engine": "0.5.18"}],
        "replaces SGLang's own default",
    ),
    "env-unread": (
        [
            {"env": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "engine": "0.5.21"},
            {"env": {"SGLANG_ENABLE_SPEC_V2": "1"}, "engine": "0.5.20"},
        ],
        [
            {"env": {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "engine": "0.5.22"},
            {"env": {"SGLANG_ENABLE_SPEC_V2": "1"}, "engine": "0.5.9"},
        ],
        "env.SGLANG_",
    ),
    "env-secret": (
        [
            {"env": {"HF_TOKEN": "hunter2"}},
            {"env": {"AWS_SECRET_ACCESS_KEY": "hunter2"}},
            {"env": {"OPENAI_API_KEY": "hunter2"}},
            {"env": {"proxy_password": "hunter2"}},
            {"nccl": {"NCCL_NET_SECRET": "hunter2"}},
        ],
        [
            {"env": {"TOKENIZERS_PARALLELISM": "false"}},
            {"env": {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "4096"}},
            {"env": {"HF_TOKEN": None}},
        ],
        "sglang_server_env",
    ),
    "fusion-gate": (
        [
            {"patches": SM120, "engine": "0.5.9"},
            {"patches": SM120[:1], "engine": "0.5.17", "launch": {"compute_capability": "12.0"}},
            {"patches": SM120[:1], "engine": "0.5.9", "launch": {"allow_experimental": True}},
        ],
        [
            {"patches": SM120, "engine": "0.5.20"},
            {"patches": SM120, "engine": "0.5.18", "launch": {"compute_capability": "12.0"}},
            {"patches": SM120, "engine": "0.5.9", "launch": {"compute_capability": "9.0"}},
            {"patches": SM120, "engine": "0.5.9", "launch": {"allow_experimental": True}},
            {"patches": SM120, "engine": "0.5.9", "device": "cpu"},
            {"patches": (), "engine": "0.5.9"},
        ],
        "patch sm120_allreduce_fusion",
    ),
    "patch-experimental": (
        [{"entries": [GATE], "engine": "0.5.9"}],
        [{"entries": [GATE], "engine": "0.5.20"}, {"entries": [{**GATE, "experimental": False}], "engine": "0.5.9"}],
        "patch flashinfer_sm120_gate",
    ),
    "patch-version": (
        [{"entries": [{**GATE, "families": GATE["families"][:1]}], "engine": "0.5.20"}],
        [{"entries": [GATE], "engine": "0.5.20"}],
        "flashinfer 0.6.18",
    ),
    "kv-fp8-int4": (
        [{"args": {"kv-cache-dtype": "fp8_e4m3"}, "launch": KIMI}],
        [
            {"args": {"kv-cache-dtype": "auto"}, "launch": KIMI},
            {"args": {"kv-cache-dtype": "fp8_e4m3"}, "launch": {"model_path": "/models/Kimi-K2.5-NVFP4"}},
            {"args": {"kv-cache-dtype": "fp8_e4m3"}, "launch": {"model_path": "/models/other"}},
        ],
        "args.kv-cache-dtype",
    ),
    "alloc-expandable-ipc": (
        [
            {"env": EXPANDABLE},
            {"env": {**EXPANDABLE, "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "args": OFF, "engine": "0.5.22"},
            {"env": {**EXPANDABLE, "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "True"}, "args": OFF, "engine": "0.5.22"},
            {"env": EXPANDABLE, "args": OFF, "patches": SM120},
        ],
        [{"env": EXPANDABLE, "args": OFF}, {"env": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}}],
        "env.PYTORCH_CUDA_ALLOC_CONF",
    ),
    "spec-draft": (
        [
            {"args": {"speculative-algorithm": "EAGLE3"}},
            {"args": {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": ""}},
            {"args": {"speculative-algorithm": "eagle3"}},
            {"args": {"speculative-algorithm": "NEXTN"}},
            {"args": {"speculative-algorithm": "DFLASH"}},
        ],
        [{"args": EAGLE3}, {"args": {"speculative-algorithm": "NGRAM"}}],
        "args.speculative-draft-model-path",
    ),
    "spec-engine": (
        [{"args": EAGLE3, "engine": "0.5.9"}],
        [{"args": EAGLE3, "engine": "0.5.10"}, {"args": {"speculative-algorithm": "NGRAM"}, "engine": "0.5.9"}],
        "args.speculative-algorithm",
    ),
    "tp-gpus": ([{"launch": {"gpu_count": 4}}], [{"launch": {"gpu_count": 8}}, {"launch": {}}], "tp_size 8"),
    "tp-idle": (
        [{"launch": {"gpu_count": 8}, "tp": 4}],
        [{"launch": {"gpu_count": "8"}, "tp": 8}, {"launch": {"gpu_count": 8}, "tp": 4, "device": "cpu"}],
        "8 GPUs",
    ),
    "bind-open": (
        [{"launch": {"host": "0.0.0.0"}}, {"launch": {"host": "::", "has_api_key": False}}],
        [{"launch": {"host": "127.0.0.1"}}, {"launch": {"host": "0.0.0.0", "has_api_key": True}}, {"launch": {}}],
        "launch.host",
    ),
}


@pytest.fixture
def graphs(tmp_path, monkeypatch):
    """Put a graph file for eight ranks, and a broken one, into the working directory."""
    gpus = "".join(f'<gpu dev="{number}"/>' for number in range(8))
    channels = f"<channel>{gpus}</channel>" * 2
    (tmp_path / "eight.xml").write_text(f'<graphs version="1"><graph id="0">{channels}</graph></graphs>')
    (tmp_path / "broken.xml").write_text("<graphs>")
    monkeypatch.chdir(tmp_path)


def cases(index):
    """Return (rule, case) pairs of the refused (0) or the passed (1) ones."""
    return [
        pytest.param(rule, case, id=f"{rule}-{n}") for rule, row in CASES.items() for n, case in enumerate(row[index])
    ]


def test_every_rule_has_both_outcomes():
    assert set(CASES) == set(RULES)
    assert all(refused and passed for refused, passed, _named in CASES.values())


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("rule", "case"), cases(0))
def test_it_is_found(lint, rule, case):
    hits = [item for item in lint(**case) if item["rule"] == rule]
    assert len(hits) == 1
    hit = hits[0]
    assert hit["rung"] == "lint"
    assert hit["level"] == RULES[rule].level
    assert CASES[rule][2] in f"{hit['message']} {hit['advice']}"
    assert hit["evidence"]
    assert hit["advice"]


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(("rule", "case"), cases(1))
def test_it_passes(lint, rule, case):
    assert [item for item in lint(**case) if item["rule"] == rule] == []


def test_bare_tree_is_answered_with_the_list_form(lint):
    hit = next(item for item in lint(nccl={"NCCL_ALGO": "Tree"}) if item["rule"] == "nccl-algo-collective")
    assert "AllGather" in hit["message"]
    assert "AllReduce" not in hit["message"]
    assert "ring;allreduce:tree" in hit["advice"]


def test_fusion_refusal_has_three_facts_and_three_ways_out(lint):
    hit = next(item for item in lint(patches=SM120, engine="0.5.9") if item["rule"] == "fusion-gate")
    assert [
        "1. " in hit["evidence"],
        "2. SGLang 0.5.9 pins FlashInfer 0.6.3" in hit["evidence"],
        "3. " in hit["evidence"],
    ] == [True] * 3
    assert "0.5.20" in hit["advice"]
    assert "flashinfer_sm120_gate" in hit["advice"]
    assert "pcie_ipc" in hit["advice"]


def test_a_secret_is_not_repeated(lint):
    assert "hunter2" not in str(lint(args={"api-key": "hunter2"}))
    assert "hunter2" not in str(lint(env={"HF_TOKEN": "hunter2"}))


def test_a_missing_graph_file_is_answered_with_its_input(lint):
    hit = next(item for item in lint(nccl={"NCCL_GRAPH_FILE": ""}) if item["rule"] == "nccl-value")
    assert "sglang_nccl_graph_file" in hit["advice"]


def test_errors_come_first(lint):
    levels = [
        item["level"] for item in lint(nccl={"NCCL_ALGO": "Tree", "NCCL_MIN_NCHANNELS": "1", "NCCL_P2P_LEVEL": "1"})
    ]
    assert levels == sorted(levels, key=LEVELS.index)
    assert set(levels) == set(LEVELS)


def test_every_rule_is_documented_in_its_own_words(repository):
    text = (repository / "docs/lint-rules.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{item.id}` | {item.level} | {item.text} |" for item in RULES.values()]
