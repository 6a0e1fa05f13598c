"""The words of the log that the project reads, looked for in the sources of every release."""

from __future__ import annotations

import ast
import zipfile

import pytest
from ansible.module_utils import sglang_activation_rules as rules
from ansible.module_utils import sglang_launch_probe as probe

from .conftest import wheel
from .test_releases import SGLANG

# Files that hold any of them have one of these in their text.
NEEDLES = (
    "fired up and ready",
    "Prefill batch",
    "Decode batch",
    "FlashInfer",
    "flashinfer.comm",
    "PCIe-IPC",
    "Custom allreduce",
)


def texts(version):
    """Return the texts of a release's sources, pieces of an f-string joined."""
    found = []
    with zipfile.ZipFile(wheel("sglang", version)) as archive:
        for name in archive.namelist():
            if not name.startswith("sglang/srt/") or not name.endswith(".py"):
                continue
            source = archive.read(name).decode("utf-8")
            if not any(needle in source for needle in NEEDLES):
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = [item.value if isinstance(item, ast.Constant) else "{}" for item in node.values]
                    found.append("".join(map(str, parts)))
    return found


@pytest.mark.parametrize("version", SGLANG)
def test_the_words_are_those_of_the_release(version):
    said = texts(version)

    def told(pattern):
        return [text for text in said if pattern.search(text)]

    assert any(probe.READY.decode() in text for text in said)
    assert {text.split(" batch")[0][-7:] for text in said if probe.STEP.search(text.encode())} >= {"Prefill", "Decode"}
    assert told(rules.FUSION_ON) and len(told(rules.FUSION_OFF)) >= 2
    assert told(rules.CUSTOM_OFF)
    if tuple(map(int, version.split(".post")[0].split("."))) >= (0, 5, 21):
        assert told(rules.PCIE_IPC_ON) and len(told(rules.PCIE_IPC_OFF)) >= 5 and len(told(rules.PCIE_IPC_SEED)) >= 4
    else:
        assert not told(rules.PCIE_IPC_ON)
