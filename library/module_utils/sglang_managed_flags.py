"""The flags that the deployment renders itself: neither a variant nor sglang_server_args may repeat them."""

from __future__ import annotations

# Flag, aliases included: what to use. Twice on one command line, the later one would win in silence.
MANAGED = {
    "model-path": "sglang_server_model_path",
    "model": "sglang_server_model_path",
    "served-model-name": "sglang_server_served_model_name",
    "tp-size": "sglang_server_tp_size",
    "tensor-parallel-size": "sglang_server_tp_size",
    "tp": "sglang_server_tp_size",
    "host": "sglang_server_host",
    "port": "sglang_server_port",
    "api-key": "sglang_server_api_key or sglang_server_api_key_file",
    "config": "one flag for each line of that file",
}
