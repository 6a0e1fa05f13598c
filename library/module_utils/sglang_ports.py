"""The TCP ports that a server takes: that of its endpoint and those that SGLang derives from its flags."""

from __future__ import annotations

import re

from ansible.module_utils.sglang_proc import port_of

# SGLang's PortArgs with DP attention: rendezvous at the HTTP port + 233, then up to six ports after it.
DP_PORT_DELTA = 233
DP_PORTS = 7


def derived_ports(args, port):
    """Return ``{port: flag}`` of what SGLang takes besides the HTTP port, as 0.5.9 to 0.5.23 derive them.

    On one host without DP attention everything else is a UNIX socket or a port that SGLang finds free by itself.

    :param args: ``{flag without dashes: value}``. :param port: the HTTP port.
    """
    found = {}
    if str(args.get("nccl-port") or "").isdigit():
        found[int(args["nccl-port"])] = "nccl-port"
    match = re.search(r":(\d+)$", str(args.get("dist-init-addr") or ""))
    base = int(match.group(1)) if match else None
    if base:
        found[base] = "dist-init-addr"
    if str(args.get("enable-dp-attention")).lower() == "true":
        if base is None:
            base = port + DP_PORT_DELTA
            base = base if base <= 65535 else port - DP_PORT_DELTA
        found.update({base + offset: "enable-dp-attention" for offset in range(DP_PORTS) if base + offset <= 65535})
    return found


def flags_of(argv):
    """Return ``{flag without dashes: value}`` of a launch line; a bare flag is true, of several the first value."""
    found = {}
    for word, after in zip(argv, [*argv[1:], "--"]):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value or (True if after.startswith("--") else after)
    return found


def ports_of(launch):
    """Return the set of TCP ports that the server of a launch takes on this host; empty where it names none."""
    port = port_of(launch)
    return {port, *derived_ports(flags_of(launch.get("argv") or []), port)} if port else set()
