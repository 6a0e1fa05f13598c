"""For every rule a variant that it refuses, one that it lets pass, and what the refusal must name."""

from __future__ import annotations

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
MULTICAST = {**GATE, "families": [{"versions": ">=0.6.4,<0.6.10", "refused": "needs multicast", "files": []}]}
MULTICAST["families"] += GATE["families"]
SM12 = {"compute_capability": "12.0"}
FUSION, OLD_FUSION = "flashinfer-allreduce-fusion-backend", "enable-flashinfer-allreduce-fusion"
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
            {"nccl": {"NCCL_DEBUG": "VERBOSE"}},
            {"nccl": {"NCCL_CUMEM_ENABLE": "7"}},
            {"nccl": {"NCCL_NVLS_ENABLE": "3"}},
            {"nccl": {"NCCL_BUFFSIZE": "-1"}},
            {"nccl": {"NCCL_BUFFSIZE": "0"}},
            {"nccl": {"NCCL_BUFFSIZE": "2147483648"}},
        ],
        [
            {"nccl": {"NCCL_PROTO": "ll,simple"}},
            {"nccl": {"NCCL_ALGO": "ring;AllReduce:^nvls"}},
            {"nccl": {"NCCL_P2P_DISABLE": "1"}},
            {"nccl": {"NCCL_IB_DISABLE": "1"}},
            {"nccl": {"NCCL_DEBUG": "info", "NCCL_CUMEM_ENABLE": "-2", "NCCL_NVLS_ENABLE": "2"}},
            {"nccl": {"NCCL_BUFFSIZE": "131072"}},
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
            {"nccl": {"NCCL_PROTO": "^LL,LL128,Simple"}},
            {"nccl": {"NCCL_PROTO": "LL;allgather:^LL,LL128,Simple"}},
            {"nccl": {"NCCL_PROTO": ","}},
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
            {"nccl": {"NCCL_PROTO": "^LL128,Simple"}},
            {"nccl": {"NCCL_PROTO": "^"}},
            {"nccl": {}},
        ],
        "nccl.NCCL_",
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
        [{"nccl": {"NCCL_NTHREADS": text}} for text in ("96", "1024", "0x60", "many", "0100", "-0x40")],
        [{"nccl": {"NCCL_NTHREADS": text}} for text in ("64", "512", "0x40", "0X200", " +64")],
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
    "flag-range": (
        [{"args": {"mem-fraction-static": fraction}} for fraction in (0, 1, "1.5", -0.1, "nan", 88)]
        + [
            {"args": {"speculative-num-steps": 0}},
            {"args": {"speculative-num-draft-tokens": "-4"}},
            {"args": {"max-running-requests": 0}},
            {"args": {"chunked-prefill-size": -2}},
            {"args": {"max-total-tokens": "0"}, "engine": "0.5.20"},
            {"args": {"watchdog-timeout": 0}},
        ],
        [
            {"args": {"mem-fraction-static": "0.88", "speculative-num-steps": "3", "chunked-prefill-size": -1}},
            {"args": {"max-total-tokens": "8k"}, "engine": "0.5.20"},
            {"args": {"mem-fraction-static": None, "max-running-requests": False, "attention-backend": "triton"}},
        ],
        "is out of range",
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
        [
            {"engine": "0.5.8.post1", "launch": KIMI},
            {"engine": "0.5.8.post1", "launch": {"model_path": "/models/kimi_k25-int4"}},
        ],
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
    "env-outside": (
        [
            {"launch": {"server_env": ["NCCL_ALGO", "HF_HUB_OFFLINE"]}},
            {"launch": {"server_env": ["OMP_NUM_THREADS"]}, "env": {"OMP_NUM_THREADS": "1"}},
        ],
        [
            {"launch": {"server_env": ["OMP_NUM_THREADS", "HF_TOKEN"]}, "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}},
            {"launch": {"server_env": []}, "nccl": {"NCCL_ALGO": "Ring"}},
        ],
        "sglang_variant_overrides",
    ),
    "fusion-unpatched": (
        [
            {"args": {FUSION: "auto"}, "launch": SM12},
            {"args": {OLD_FUSION: "true"}, "launch": SM12, "engine": "0.5.9"},
            {"args": {FUSION: "trtllm"}, "launch": {"compute_capability": 12.0}, "patches": SM120[1:]},
        ],
        [
            {"args": {FUSION: "auto"}, "launch": SM12, "patches": SM120},
            {"args": {FUSION: "auto"}, "launch": {"compute_capability": "10.0"}},
            {"args": {FUSION: "auto"}},
            {"args": {FUSION: "auto"}, "launch": SM12, "device": "cpu"},
            {"args": {OLD_FUSION: "false", FUSION: None}, "launch": SM12},
        ],
        "without the patch sm120_allreduce_fusion",
    ),
    "fusion-scope": (
        [{"args": {FUSION: "auto"}, "engine": "0.5.18"}, {"args": {FUSION: "auto"}, "engine": "0.5.23"}],
        [{"args": {FUSION: "auto"}, "engine": "0.5.17"}, {"args": {FUSION: "auto"}, "device": "cpu"}, {"args": {}}],
        "changes two things",
    ),
    "fusion-gate": (
        [
            {"patches": SM120, "engine": "0.5.9"},
            {"patches": SM120[:1], "engine": "0.5.17", "launch": {"compute_capability": "12.0"}},
            {"patches": SM120[:1], "engine": "0.5.9", "launch": {"allow_experimental": True}},
            {"patches": SM120, "entries": [MULTICAST], "engine": "0.5.10", "launch": {"allow_experimental": True}},
        ],
        [
            {"patches": SM120, "engine": "0.5.20"},
            {"patches": SM120, "engine": "0.5.18", "launch": {"compute_capability": "12.0"}},
            {"patches": SM120, "engine": "0.5.9", "launch": {"compute_capability": "9.0"}},
            {"patches": SM120, "engine": "0.5.9", "launch": {"allow_experimental": True}},
            {"patches": SM120, "entries": [MULTICAST], "engine": "0.5.9", "launch": {"allow_experimental": True}},
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
            {"args": {"kv-cache-dtype": "fp8_e4m3"}, "launch": {"model_path": "/models/Kimi-K2-Instruct"}},
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
    "spec-model": (
        [
            {"args": {**EAGLE3, "speculative-draft-model-path": draft}, "launch": {"model_path": "/models/llama"}}
            for draft in ("AQ-MedAI/Kimi-K25-eagle3", "lightseekorg/kimi-k2.5-eagle3-mla")
        ],
        [
            {"args": {**EAGLE3, "speculative-draft-model-path": "AQ-MedAI/Kimi-K25-eagle3"}, "launch": KIMI},
            {"args": {**EAGLE3, "speculative-draft-model-path": "AQ-MedAI/Kimi-K25-eagle3"}},
            {"args": EAGLE3, "launch": {"model_path": "/models/llama"}},
        ],
        "draft model for Kimi-K2.5",
    ),
    "spec-engine": (
        [{"args": EAGLE3, "engine": "0.5.9"}, {"args": EAGLE3, "engine": "0.5.9", "launch": KIMI}],
        [
            {"args": EAGLE3, "engine": "0.5.10"},
            {"args": {"speculative-algorithm": "NGRAM"}, "engine": "0.5.9"},
            {"args": EAGLE3, "engine": "0.5.9", "launch": {"model_path": "/models/llama"}},
        ],
        "args.speculative-algorithm",
    ),
    "tp-gpus": (
        [
            {"launch": {"gpu_count": 4}},
            {"launch": {"gpu_count": 8}, "args": {"pp-size": 2}},
            {"launch": {"gpu_count": 8}, "args": {"data-parallel-size": "2"}, "engine": "0.5.9"},
        ],
        [
            {"launch": {"gpu_count": 8}},
            {"launch": {}},
            {"launch": {"gpu_count": 8}, "args": {"dp-size": 2, "enable-dp-attention": True}},
            {"launch": {"gpu_count": 8}, "args": {"dp-size": 8, "attn-dp-size": 8}, "engine": "0.5.23"},
            {"launch": {"gpu_count": 4}, "args": {"nnodes": 2}},
        ],
        "tp_size 8",
    ),
    "tp-idle": (
        [{"launch": {"gpu_count": 8}, "tp": 4}],
        [
            {"launch": {"gpu_count": "8"}, "tp": 8},
            {"launch": {"gpu_count": 8}, "tp": 4, "device": "cpu"},
            {"launch": {"gpu_count": 8}, "tp": 4, "args": {"pp-size": 2}},
            {"launch": {"gpu_count": 8}, "tp": 4, "args": {"dp-size": 2}},
        ],
        "8 GPUs",
    ),
    "api-key": (
        [{"launch": {"api_key_problem": "sglang_server_api_key needs 16 characters"}}],
        [{"launch": {"api_key_problem": ""}}, {"launch": {}}],
        "sglang_server_api_key",
    ),
    "bind-open": (
        [{"launch": {"host": "0.0.0.0"}}, {"launch": {"host": "::", "has_api_key": False}}],
        [{"launch": {"host": "127.0.0.1"}}, {"launch": {"host": "0.0.0.0", "has_api_key": True}}, {"launch": {}}],
        "launch.host",
    ),
}
