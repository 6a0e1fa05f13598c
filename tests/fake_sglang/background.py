"""``background.py start|stop RELEASE``: run the scripted server of a release without a service manager."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys


def main(verb, release):
    """Start the server detached and note its pid in ``server.pid``; or kill the group of the pid noted there."""
    note = pathlib.Path(release) / "server.pid"
    if verb == "stop":
        try:
            os.killpg(int(note.read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended by itself
        note.unlink()
        return
    launch = json.loads((pathlib.Path(release) / "launch.json").read_text())
    with open(launch["log"], "wb") as log:
        server = subprocess.Popen(
            launch["argv"],
            cwd=launch["cwd"],
            env={**os.environ, **launch["env"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    note.write_text(str(server.pid))


if __name__ == "__main__":
    main(*sys.argv[1:])
