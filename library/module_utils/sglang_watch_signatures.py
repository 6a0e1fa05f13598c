"""Known causes of a failed start, as data, and the choice among them.

Each signature: ``name``; ``match``, a regular expression for one error line; ``phases``, where it applies (all when
absent); ``generic``, true for a message that says too little or follows from another rank's failure; ``message``;
``advice``.
The order is that of preference among the signatures that match the same line.
"""

from __future__ import annotations

import re

SIGNATURES = (
    {
        "name": "nccl_algorithm",
        "match": r"(?i)no algorithm/protocol available for function",
        "message": "NCCL has no algorithm left for a collective: NCCL_ALGO or NCCL_PROTO rules out all it could use.",
        "advice": "name the collective that is meant, for example NCCL_ALGO=allreduce:tree, and leave the others alone",
    },
    {
        "name": "flashinfer_gate",
        "match": r"No supported CUDA architectures found for major versions",
        "message": "FlashInfer's gate does not list this GPU's architecture.",
        "advice": "use a variant whose patches open FlashInfer's gate for SM12, or one without the all-reduce fusion",
    },
    {
        "name": "oom_weights",
        "match": r"(?i)^(?!.*Capture cuda graph failed).*(?:CUDA out of memory|OutOfMemoryError)",
        "phases": ("imports", "distributed", "weights"),
        "message": "GPU memory ran out while the weights were loaded.",
        "advice": "free the GPUs (another process may hold memory), use more GPUs or a smaller quantisation",
    },
    {
        "name": "oom_kv_cache",
        # A capture that failed says so itself, whatever phase the slower ranks are still in.
        "match": r"(?i)^(?!.*Capture cuda graph failed).*"
        r"(?:CUDA out of memory|OutOfMemoryError|Not enough memory\. Please try to increase --mem-fraction)",
        "phases": ("kv_cache",),
        "message": "GPU memory ran out while the KV cache was allocated.",
        "advice": "change mem-fraction-static (raise it when the message asks for it), or lower context-length",
    },
    {
        "name": "oom_graph",
        "match": r"(?i)CUDA out of memory|OutOfMemoryError",
        "message": "GPU memory ran out during graph capture or the first requests.",
        "advice": "lower mem-fraction-static or cuda-graph-max-bs",
    },
    {
        "name": "undefined_name",
        "match": r"NameError: name '|UnboundLocalError: ",
        "message": "The code uses a name that nothing defines: a patch is incomplete for this version.",
        "advice": "check this variant's patches against the installed version; meanwhile deploy one without them",
    },
    {
        "name": "missing_shard",
        "match": r"No such file or directory: .*\.(?:safetensors|bin|pt)\b|SafetensorError"
        r"|Cannot find any model weights|Missing keys .* in loaded state|weights were not initialized",
        "message": "A weight file is missing, cut short or not what the index says.",
        "advice": "stage the model again and compare the files with its index",
    },
    {
        "name": "bad_flag",
        "match": r"launch_server\.py: error: |argparse\.ArgumentError|error: unrecognized arguments",
        "message": "The launch line has a flag or a value that this SGLang does not know.",
        "advice": "compare the variant's args with `python -m sglang.launch_server --help` of this engine",
    },
    {
        "name": "model_missing",
        "match": r"Can't load the configuration of|couldn't find them in the cached files|LocalEntryNotFoundError"
        r"|does not appear to have a file named|HFValidationError|is not a local folder and is not a valid model",
        "message": "The model path holds no model that can be read.",
        "advice": "check the model path on this host and that the service user may read it",
    },
    {
        "name": "port_taken",
        "match": r"error while attempting to bind on address|\[Errno 98\]|EADDRINUSE|[Aa]ddress already in use",
        "message": "The port is held by another process.",
        "advice": "stop that process or choose another port",
    },
    {
        "name": "tokenizer",
        "match": r"(?i)instantiate the backend tokenizer|can't load tokenizer|chat template .* is not a built-in"
        r"|jinja2\.exceptions|tokenizer class .* does not exist|tokenizer\.json.*(?:No such file|not found)",
        "message": "The tokenizer or the chat template cannot be loaded.",
        "advice": "check tokenizer files and the chat-template flag of the model",
    },
    {
        "name": "disk_full",
        "match": r"\[Errno 28\]|No space left on device",
        "message": "A disk is full.",
        "advice": "free space where the message points (compiled kernels and logs grow there)",
    },
    {
        "name": "driver_mismatch",
        "match": r"Driver/library version mismatch|Error 803|CUDA driver version is insufficient"
        r"|unsupported display driver / cuda driver combination",
        "message": "The NVIDIA driver in the kernel and the library do not belong together.",
        "advice": "reboot, and hold the driver packages against unattended upgrades",
    },
    {
        "name": "xid",
        "match": r"NVRM: Xid|GPU has fallen off the bus|GPU is lost",
        "message": "A GPU reported a hardware error (Xid).",
        "advice": "look up the Xid in the kernel log; drain the GPU before the next start",
    },
    {
        "name": "p2p_hang",
        "match": r"Watchdog caught collective operation timeout",
        "message": "A collective never finished: peer-to-peer traffic between GPUs hangs.",
        "advice": "check IOMMU and ACS on this host, and try NCCL_P2P_DISABLE=1 to prove it",
    },
    {
        "name": "oom_killed",
        "match": r"Out of memory: Killed process|[Ee]xit ?code ?=?:? ?-9\b",
        "message": "A process was killed with signal 9, most likely by the kernel because host memory ran out.",
        "advice": "look for 'Out of memory' in the kernel log; lower the load threads or raise the memory limit",
    },
    {
        "name": "cuda_fault",
        "match": r"Cuda failure \d+|CUDA error: |CUDNN_STATUS_|CUBLAS_STATUS_",
        "generic": True,
        "message": "A CUDA call failed on one rank; what the other ranks report follows from it.",
        "advice": "start from the first error; run once with CUDA_LAUNCH_BLOCKING=1 where it names no kernel",
    },
    {
        "name": "nccl_unhandled",
        "match": r"unhandled (?:cuda|system) error|ncclSystemError|ncclUnhandledCudaError|NCCL error",
        "generic": True,
        "message": "NCCL reported an error that it cannot explain.",
        "advice": "start once with NCCL_DEBUG=WARN; the first error of the log is the one to look at",
    },
    {
        "name": "peer_lost",
        "match": r"Connection (?:closed by peer|reset by peer)|Broken pipe|EOFError",
        "generic": True,
        "message": "A process lost another one that died first.",
        "advice": "look for the process that died: another rank's log, the kernel log",
    },
)

# Causes that are seen in the processes or at the endpoint and not in the log.
OBSERVED = {
    "unknown": {
        "message": "The server failed for a reason that no signature knows.",
        "advice": "start from the first error of the log",
    },
    "died_silently": {
        "message": "The server process died and the log does not say why.",
        "advice": "look in the kernel log for the OOM killer, and for whoever may have sent SIGKILL",
    },
    "worker_died": {
        "message": "A worker process died while its parent lives on.",
        "advice": "stop the server, it cannot serve any more; look in the kernel log for the OOM killer or an Xid",
    },
    "not_running": {
        "message": "No process of this release runs.",
        "advice": "start the service, then read its log",
    },
    "stalled": {
        "message": "The server is alive and has been silent for longer than this phase may be.",
        "advice": "look at the stacks of its processes; raise the phase's limit where the host is only slow",
    },
    "timeout": {
        "message": "The whole time limit passed before the server was ready.",
        "advice": "raise the timeout where the phases kept moving",
    },
    "abandoned": {
        "message": "Nobody waits for this server any more: the controller is gone.",
        "advice": "deploy again, which takes up the server as it is then",
    },
    "foreign_listener": {
        "message": "The port is served by a process that is not of this release.",
        "advice": "stop that process or choose another port",
    },
    "wrong_model": {
        "message": "The endpoint serves another model name than this release.",
        "advice": "find out who answers on this port",
    },
    "generation_dead": {
        "message": "The port is open and a generation never comes back.",
        "advice": "the scheduler is stuck or dead: restart the server, and keep its log",
    },
    "generation_failed": {
        "message": "The server answered a generation with an error.",
        "advice": "read the answer and the log tail",
    },
    "degenerate": {
        "message": "The server generates, but the answer is empty, one token, or the same token again and again.",
        "advice": "treat the weights and the kernels of this variant as broken",
    },
    "unauthorised": {
        "message": "The server asks for an API key that was not given or is another one.",
        "advice": "set the API key of this server",
    },
    "health_failed": {
        "message": "The process is alive and /health does not answer 200.",
        "advice": "wait while it starts; otherwise look at the log",
    },
}

_COMPILED = tuple((re.compile(item["match"]), item) for item in SIGNATURES)


def match(text, phase=None):
    """Return the first signature that matches an error line in a phase, or None."""
    for pattern, item in _COMPILED:
        if phase and "phases" in item and phase not in item["phases"]:
            continue
        if pattern.search(text):
            return item
    return None


def cause(name, phase, detail="", first_error="", ranks=()):
    """Return the dict that names a cause: ``{signature, phase, message, advice, detail, first_error, ranks}``."""
    known = next((item for item in SIGNATURES if item["name"] == name), None) or OBSERVED[name]
    return {
        "signature": name,
        "phase": phase,
        "message": known["message"],
        "advice": known["advice"],
        "detail": detail,
        "first_error": first_error,
        "ranks": list(ranks),
    }


def classify(errors, phase, ranks=()):
    """Choose the cause of a failed start from the errors of its log.

    The earliest error with a signature of its own wins, for many ranks report one failure. Generic messages
    count where there is nothing else. An error without a signature shows itself: the
    first one, never the last.

    :param errors: ``[{line, rank, phase, text}]`` in the order of the log.
    :param phase: the phase reached, for a log without errors.
    :returns: see :func:`cause`; None where there is no error.
    """
    told = [item for item in errors if item["text"]]
    if not told:
        return None
    first = told[0]
    matched = [(item, match(item["text"], item["phase"])) for item in told]
    for item, found in matched:
        if found and not found.get("generic"):
            return cause(found["name"], item["phase"], item["text"], first["text"], ranks)
    if matched[0][1]:
        return cause(matched[0][1]["name"], first["phase"], first["text"], first["text"], ranks)
    return cause("unknown", first["phase"] or phase, first["text"], first["text"], ranks)
