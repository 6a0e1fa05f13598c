"""GPUs during a measurement: what they are, what they did second by second, and whether the driver reported an error.

The samples come from one ``nvidia-smi dmon`` beside the run (it reads NVML), so that sampling takes no time from the
client's own process.
"""

from __future__ import annotations

import errno
import os
import re
import statistics
import subprocess
import tempfile

CARD = {"index": str, "name": str, "uuid": str, "driver_version": str, "power.limit": float}
# Power and temperature, utilization, clocks, violations, PCIe throughput.
DMON = ["nvidia-smi", "dmon", "-s", "pucvt", "-d", "1", "-o", "T"]
COLUMNS = {
    "pwr": "power_w",
    "gtemp": "temperature_c",
    "sm": "sm_percent",
    "pclk": "clock_mhz",
    "mclk": "memory_clock_mhz",
    "pviol": "power_violation_percent",
    "tviol": "thermal_violation",
    "rxpci": "pcie_rx_mb_s",
    "txpci": "pcie_tx_mb_s",
}
KERNEL_LOG = "/dev/kmsg"
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)[^\n]*")


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None


def parse_cards(text):
    """Return ``[{index, name, uuid, driver_version, power_limit_w}]`` from the CSV of the query :data:`CARD`."""
    out = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(CARD):
            card = dict(zip(CARD, cells))
            card["power_limit_w"] = _number(card.pop("power.limit"))
            out.append(card)
    return out


def cards():
    """Return the GPUs of this host in the order of ``nvidia-smi``; empty where there is none or none answers."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_cards(done.stdout) if done.returncode == 0 else []


def parse_dmon(text):
    """Return ``{index: {column: [values]}}`` from the output of :data:`DMON`; the header names the columns.

    A cell without a number (``-``) is left out, a column that this driver does not have is empty.
    """
    names, out = [], {}
    for line in text.splitlines():
        cells = line.lstrip("#").split()
        if line.startswith("#"):
            names = cells if "gpu" in cells else names
            continue
        row = dict(zip(names, cells))
        if not row.get("gpu", "").isdigit():
            continue
        card = out.setdefault(int(row["gpu"]), {name: [] for name in COLUMNS.values()})
        for column, name in COLUMNS.items():
            value = _number(row.get(column, "-"))
            if value is not None:
                card[name].append(value)
    return out


def summarize(samples):
    """Return one dict for each GPU: ``{index, samples}`` and ``{mean, min, max}`` of each column that was seen."""
    out = []
    for index, columns in sorted(samples.items()):
        card = {"index": index, "samples": max(map(len, columns.values()))}
        for name, values in columns.items():
            if values:
                card[name] = {"mean": round(statistics.fmean(values), 1), "min": min(values), "max": max(values)}
        out.append(card)
    return out


def parse_xid(text):
    """Return ``[{pci, xid, text}]`` for each Xid error in a piece of the kernel's log."""
    return [
        {"pci": match.group(1), "xid": int(match.group(2)), "text": match.group(0)} for match in _XID.finditer(text)
    ]


class KernelLog:
    """What the kernel says from now on.

    :ivar problem: why it cannot be read, or None.
    """

    def __init__(self, path):
        self.descriptor, self.problem = None, None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self.descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"the kernel's log {path} cannot be read: {error.strerror}"
            self.close()

    def news(self):
        """Return what came since the last call; one read of the device is one record."""
        parts = []
        while self.descriptor is not None:
            try:
                data = os.read(self.descriptor, 65536)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # records were overwritten before they were read; go on with the oldest that is left
                break
            if not data:
                break
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def close(self):
        """Close the log."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None


class Watch:
    """Samples the GPUs and listens for Xid between :meth:`__enter__` and :meth:`__exit__`; :attr:`result` has it.

    ``result``: ``{exercised, cards: [...], xid: [...], missing: [str]}``, see docs/benchmark.md.

    :param gpus: :func:`cards` of this host; with none nothing is started.
    :param command: the sampler.
    """

    def __init__(self, gpus, command=None, kernel_log=None):
        self.gpus, self.command = gpus, command or DMON
        self.log = KernelLog(kernel_log or KERNEL_LOG) if gpus else None
        self.process = self.output = None
        self.result = {"exercised": False, "cards": [], "xid": [], "missing": []}

    def __enter__(self):
        if not self.gpus:
            self.result["missing"].append(
                "no GPU answers on this host: power, clock, temperature and Xid not exercised"
            )
            return self
        self.output = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                self.command, stdout=self.output, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            self.result["missing"].append(f"GPU samples: {self.command[0]}: {error.strerror}")
        return self

    def __exit__(self, *_exc):
        if not self.gpus:
            return
        if self.process:
            self.process.terminate()
            self.process.wait()
        self.output.seek(0)
        samples = parse_dmon(self.output.read().decode("utf-8", "replace"))
        self.output.close()
        details = {card["index"]: card for card in self.gpus}
        seen = summarize(samples)
        self.result["cards"] = [{**details.get(str(card["index"]), {}), **card} for card in seen]
        self.result["exercised"] = bool(seen)
        if self.process and not seen:
            self.result["missing"].append("GPU samples: the run was shorter than one sample or nvidia-smi gave none")
        if self.log.problem:
            self.result["missing"].append(f"Xid: {self.log.problem}")
        self.result["xid"] = parse_xid(self.log.news())
        self.log.close()
