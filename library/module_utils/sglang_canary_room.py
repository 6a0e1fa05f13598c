"""Whether a canary fits beside the live server: what is free, what it takes, and the share that it may use."""

from __future__ import annotations

_TOLERANCE_MB = 256


def mem_available_mb(path="/proc/meminfo"):
    """Return MiB of memory that the kernel says can be had without swapping."""
    with open(path, encoding="ascii") as handle:
        return next(int(line.split()[1]) for line in handle if line.startswith("MemAvailable")) / 1024


def gpus_mb(run):
    """Return free MiB of each GPU in the order of NVML.

    :param run: callable ``run(argv) -> (rc, stdout, stderr)``.
    :raises OSError: nvidia-smi is missing or fails.
    """
    rc, out, err = run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"])
    if rc:
        raise OSError(f"nvidia-smi ended with {rc}: {(err or out).strip()[:300]}")
    return [float(line) for line in out.split("\n") if line.strip()]


def of_server(free, launch):
    """Return those GPUs' figures that a launch uses: its visible devices, from its first one on, one a rank."""
    args = (launch.get("expect") or {}).get("args") or {}
    visible = launch["env"].get("CUDA_VISIBLE_DEVICES", "")
    listed = [item.strip() for item in visible.split(",") if item.strip()]
    if listed and all(item.isdigit() and int(item) < len(free) for item in listed):
        free = [free[int(item)] for item in listed]
    first = int(args.get("base-gpu-id") or 0)
    return free[first : first + int(launch.get("tp_size") or 1)]


def free_mb(device, launch, run):
    """Return free MiB: one figure for each GPU of a server, or one for the host.

    :raises OSError: they cannot be read.
    """
    return of_server(gpus_mb(run), launch) if device == "cuda" else [mem_available_mb()]


def room(device, free, weights, overhead, keep, tp_size):
    """Return ``{device, free_mb, needed_mb, keep_mb, fits, share}``.

    A GPU takes one rank, a host all of them. ``share`` is the canary's mem-fraction-static: what is free, less what is
    kept for the live server. The KV cache has a limit of its own, so the share is an upper bound and no demand.

    :param free: MiB, of each GPU or of the host.
    :param weights: MiB of weights a rank.
    :param overhead: MiB that a rank takes beside them.
    :param keep: MiB that must stay free for the live server.
    """
    least = min(free) if free else 0
    needed = (weights + overhead) * (1 if device == "cuda" else tp_size)
    return {
        "device": device,
        "free_mb": [round(item) for item in free],
        "needed_mb": round(needed),
        "keep_mb": round(keep),
        "fits": least - keep >= needed,
        "share": round(min(0.9, max(0.1, (least - keep) / least)), 3) if least else 0.1,
    }


def given_back(before, now):
    """Return whether as much is free as before, but for what other processes do."""
    return all(one >= two - _TOLERANCE_MB for one, two in zip(now, before))
