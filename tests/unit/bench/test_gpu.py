"""GPU samples and Xid from what nvidia-smi and the kernel wrote; no GPU is used here."""

from __future__ import annotations

import os
import pathlib
import stat
import sys
import time

from ansible.module_utils import sglang_fingerprint as prints
from ansible.module_utils import sglang_nvidia as nvidia

CAPTURED = pathlib.Path(__file__).parent / "captured"
CARDS = "0, NVIDIA RTX PRO 6000, GPU-aa, 580.95.05, 600.00\n1, NVIDIA RTX PRO 6000, GPU-bb, 580.95.05, [N/A]\n"
XID = "6,1234,5678,-;NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


def test_cards_are_read_and_an_unknown_limit_is_none():
    first, second = nvidia.parse_cards(CARDS)
    assert first["name"] == "NVIDIA RTX PRO 6000"
    assert first["power_limit_w"] == 600.0
    assert second["power_limit_w"] is None
    assert nvidia.parse_cards("NVIDIA-SMI has failed because it couldn't communicate\n") == []


def test_samples_of_a_real_card_are_read_by_the_names_in_the_header():
    (card,) = nvidia.summarize(nvidia.parse_dmon((CAPTURED / "dmon.log").read_text()))
    assert card["samples"] == 4
    assert card["power_w"] == {"mean": 87.8, "min": 80.0, "max": 111.0}
    assert card["memory_clock_mhz"]["mean"] == 3201.0
    assert card["clock_mhz"]["max"] == 375.0
    assert card["pcie_tx_mb_s"] == {"mean": 0.5, "min": 0.0, "max": 1.0}


def test_a_column_that_a_driver_lacks_is_left_out():
    text = "# gpu    pwr  gtemp\n# Idx      W      C\n    0     90      -\n    1     95     41\n"
    first, second = nvidia.summarize(nvidia.parse_dmon(text))
    assert "temperature_c" not in first and "pcie_rx_mb_s" not in first
    assert second["temperature_c"]["mean"] == 41.0
    assert nvidia.parse_dmon("") == {}


def test_an_xid_during_the_run_is_seen_and_one_from_before_is_not(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(XID.replace("79", "31"))
    sampler = tmp_path / "nvidia-smi"
    sampler.write_text(f"#!{sys.executable}\nimport time\nprint({(CAPTURED / 'dmon.log').read_text()!r}, flush=True)\n")
    sampler.write_text(sampler.read_text() + "time.sleep(60)\n")
    sampler.chmod(sampler.stat().st_mode | stat.S_IXUSR)
    watch = nvidia.Watch(nvidia.parse_cards(CARDS), [str(sampler)], str(log))
    with watch:
        with log.open("a") as handle:
            handle.write(XID)
        end = time.monotonic() + 10
        while not os.fstat(watch.output.fileno()).st_size and time.monotonic() < end:
            time.sleep(0.02)
    assert watch.result["xid"] == [{"pci": "PCI:0000:61:00", "xid": 79, "text": XID.split(";", 1)[1].strip()}]
    assert watch.result["exercised"] is True
    assert watch.result["cards"][0]["name"] == "NVIDIA RTX PRO 6000"
    assert watch.result["missing"] == []
    assert watch.process.poll() is not None


def test_what_cannot_be_read_is_named(tmp_path):
    cards = nvidia.parse_cards(CARDS)
    with nvidia.Watch(cards, [str(tmp_path / "nothing")], str(tmp_path / "absent")) as watch:
        pass
    assert watch.result["exercised"] is False
    assert [text.split(":")[0] for text in watch.result["missing"]] == ["GPU samples", "Xid"]
    with nvidia.Watch([]) as watch:
        pass
    assert "not exercised" in watch.result["missing"][0]


def test_the_fingerprint_tells_what_differs_first_to_last():
    cards = nvidia.parse_cards(CARDS)
    one = prints.fingerprint(None, {"client_version": "2", "requests": "2"}, cards)
    assert one["gpu_count"] == 2
    assert one["driver"] == "580.95.05"
    assert one["power_limit_w"] == [600.0, None]
    assert set(prints.KEYS) < set(one)
    assert "nccl_version" in one["unknown"]
    same = dict(one, launch_digest="another", requests="3")
    assert prints.differences(one, same) == []
    assert prints.digest(same) == one["digest"]
    other = dict(one, driver="590.10", nccl_path="/x/libnccl.so.2", gpu_names=["A", "A"])
    assert prints.differences(one, other) == [
        "gpu_names: 2 x NVIDIA RTX PRO 6000 against 2 x A",
        "driver: 580.95.05 against 590.10",
        "nccl_path: none against /x/libnccl.so.2",
    ]
    assert prints.digest(other) != one["digest"]
    assert prints.differences(one, None)


def test_what_is_not_known_is_said_and_keeps_no_runs_apart(tmp_path, monkeypatch):
    """Two values that could not be read are not known to be equal; what nobody compares is left out."""
    cards = nvidia.parse_cards(CARDS)
    one = prints.fingerprint(None, None, cards)
    assert prints.differences(one, one) == []
    assert prints.unknown(one, one) == [
        "not known on both sides: nccl_version, engine_version, engine_digest, model_digest"
    ]
    other = dict(one, unknown=["launch_digest", "nccl_version"])
    assert prints.unknown(one, other) == [
        "not known on both sides: nccl_version",
        "not known on one side: engine_version, engine_digest, model_digest",
    ]
    assert prints.unknown(dict(one, unknown=[]), {"driver": "580"}) == []
    monkeypatch.setattr(prints, "mapped", lambda root: ["/opt/libnccl.so.2"])
    monkeypatch.setattr(prints, "version_of_library", lambda path: None)
    found = prints.fingerprint(str(tmp_path / "releases" / "r"), None, cards)
    assert found["nccl_path"] == "/opt/libnccl.so.2" and "nccl_version" in found["unknown"]


def test_a_host_without_gpus_lacks_nothing_of_theirs():
    found = prints.fingerprint(None, None, [])
    assert found["gpu_count"] == 0
    assert found["driver"] is None and "driver" not in found["unknown"]
    assert " x " in found["cpu"]
