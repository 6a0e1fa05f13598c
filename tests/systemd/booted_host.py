"""One root in the container, driven through the verbs and the modules over ssh."""

from __future__ import annotations

import json
import subprocess

from deployment import BIN, ROOT, Node, environment, marked

# The account that the servers run as, made in the container.
ACCOUNT = "sglang"


class Host(Node):
    """One root in the container, driven through the verbs over ssh. Process ids are those seen from outside."""

    def __init__(self, container, inventory, root, **variables):
        super().__init__(root, **variables)
        self.container, self.inventory = container, inventory
        self.name = self.variables["sglang_server_unit"]
        self.link_path = f"/etc/systemd/system/{self.name}.service"

    def start(self, verb, *arguments, folder="", **variables):
        """Start a verb and return the Run."""
        return super().start(verb, "-i", str(self.inventory), *arguments, folder=folder, **variables)

    def module(self, name, **arguments):
        """Run one module over ssh and return its result."""
        command = [BIN / "ansible", "-i", self.inventory, "booted", "-m", name, "-a", json.dumps(arguments)]
        variables = dict(environment(), ANSIBLE_LOAD_CALLBACK_PLUGINS="1", ANSIBLE_STDOUT_CALLBACK="oneline")
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert "=> {" in done.stdout, done.stdout + done.stderr
        status, _, result = done.stdout.partition("=> ")
        return dict(json.loads(result), failed="FAILED" in status)

    def render(self, release, **arguments):
        """Write the launch files of a release that nothing else prepared; ``arguments`` go to the module."""
        given = {
            "root": str(self.root),
            "release": f"{self.root}/releases/{release}",
            "provider": "systemd",
            "unit": self.name,
            "install_unit": True,
            "python": self.variables["sglang_engine_python"],
            "model_path": str(self.root),
            "port": self.port,
        }
        return self.module("sglang_launch", **{**given, **arguments})

    def service(self, state, release=None, **arguments):
        """Run the module sglang_service."""
        given = {
            "state": state,
            "root": str(self.root),
            "release": f"{self.root}/releases/{release}" if release else None,
            "provider": "systemd",
            "unit": self.name,
            "install_unit": True,
            "stop_timeout": 10,
        }
        return self.module("sglang_service", **{**given, **arguments})

    def unit(self, *names):
        """Return properties of the unit as systemd shows them: a dict, or the value where one name is given."""
        wanted = ",".join(names or ("ActiveState", "Result", "MainPID", "NRestarts", "UnitFileState"))
        out = self.container.ssh("systemctl", "show", f"--property={wanted}", self.name).stdout
        shown = dict(line.split("=", 1) for line in out.splitlines())
        return shown[names[0]] if len(names) == 1 else shown

    @property
    def link(self):
        """Return where the host's unit points to, None where there is none."""
        return self.container.ssh("readlink", self.link_path, check=False).stdout.strip() or None

    def log(self, release):
        """Return the server's log of a release."""
        return (self.root / "releases" / release / "logs" / "server.log").read_text(errors="replace")

    def nothing_runs(self, state="inactive"):
        """Check that no process of the root is left, the port is free, and systemd holds nothing."""
        assert marked(self.root) == {}
        assert self.port_is_free()
        shown = self.unit("ActiveState", "MainPID", "ControlGroup")
        assert (shown["ActiveState"], shown["MainPID"]) == (state, "0")
        assert not shown["ControlGroup"] or self.in_control_group() == []

    def in_control_group(self):
        """Return the pids, as seen inside, in the unit's control group."""
        path = f"/sys/fs/cgroup/systemd/system.slice/{self.name}.service/cgroup.procs"
        unified = path.replace("/systemd/", "/", 1)
        return self.container.ssh(f"cat {path} {unified} 2>/dev/null", check=False).stdout.split()

    def destroy(self):
        """End what runs below the root and take the host's unit away."""
        self.container.ssh("systemctl", "kill", "--signal=KILL", self.name, check=False)
        self.container.ssh("systemctl", "reset-failed", self.name, check=False)
        self.container.ssh("rm", "-f", self.link_path)
        self.container.ssh("systemctl", "daemon-reload")
        super().destroy()
