"""The role's sitecustomize.py as Ansible writes it, run by the real interpreters of this machine."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

VALUES = {
    "PLAIN": "2",
    "EMPTY": "",
    "QUOTES": "'single' \"double\" '''triple''' \"\"\"triple\"\"\"",
    "BACKSLASH": "a\\b\\n\\",
    "NEWLINE": "one\ntwo\r\nthree\ttab",
    "JINJA": "{{ PLAIN }} {% raw %} {# no comment #} {%",
    "NON_ASCII": "äöü € 漢 \u2028 \u0085",
    "ASTRAL": "\U0001f600 \U00020000",
    "CONTROL": "\x01\x1b[31m\x7f",
    "SPACES": "  leading and trailing  ",
    "LONG": "word " * 200,
    "DOLLAR": "$HOME ${HOME} %s %(x)s",
    "NUMBER_LIKE": "007",
    "TRUE_LIKE": "yes",
    "NÄME": "a name outside ASCII",
}
CHILD = "import json, os; print(json.dumps(dict(os.environ)))"
PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
  tasks:
    - ansible.builtin.include_role:
        name: nccl_env
"""


class _Unsafe(str):
    """A value that Ansible must take as it is."""


def _write_vars(path, release, variables):
    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(_Unsafe, lambda dumper, item: dumper.represent_scalar("!unsafe", str(item), style='"'))
    # Only where it matters: the tag !unsafe makes Ansible read "007" as a number.
    values = {name: _Unsafe(value) if "{" in value else value for name, value in variables.items()}
    content = {
        "nccl_env_release_path": str(release),
        "nccl_env_variables": values,
        "nccl_env_witness": ["watched", "json"],
    }
    path.write_text(yaml.dump(content, Dumper=Dumper, allow_unicode=False))


def render(folder, repository, variables, *options):
    """Run the role on a fresh release below FOLDER; return ``(release, ansible's result)``."""
    release = folder / "releases" / "r"
    for name in ("site", "run"):
        (release / name).mkdir(parents=True, exist_ok=True)
    _write_vars(folder / "vars.yml", release, variables)
    (folder / "play.yml").write_text(PLAY)
    environment = dict(os.environ, ANSIBLE_CONFIG=str(repository / "ansible.cfg"), ANSIBLE_LOCALHOST_WARNING="False")
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "play.yml", "-e", "@vars.yml", *options]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return release, result


@pytest.fixture(scope="module")
def release(tmp_path_factory, repository):
    """A release with all of VALUES, written by the role."""
    path, result = render(tmp_path_factory.mktemp("nccl"), repository, VALUES)
    assert result.returncode == 0, result.stdout + result.stderr
    return path


def interpreters():
    """Return every Python from 3.9 that the machine offers, by PATH and by pyenv's own folder."""
    found = {}
    for minor in range(9, 15):
        for path in [shutil.which(f"python3.{minor}", path="/usr/bin"), shutil.which(f"python3.{minor}")]:
            if path:
                found[os.path.realpath(path)] = path
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    for path in sorted(pyenv.glob("versions/3.*/bin/python3")):
        minor = int(path.parts[-3].split(".")[1])
        if minor >= 9:
            found[os.path.realpath(path)] = str(path)
    return [path for path in found.values() if "shims" not in path]


def run_python(python, release, code, **environment):
    """Run CODE with PYTHONPATH as launch.json sets it; return the completed process."""
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(release / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
    base.update(environment)
    return subprocess.run([python, "-c", code], env=base, capture_output=True, text=True, encoding="utf-8", check=False)


@pytest.mark.parametrize("python", interpreters())
def test_a_spawned_child_reads_back_every_value(python, release):
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-I', '-X', 'utf8', '-c', {CHILD!r}]))"
    result = run_python(python, release, code)
    assert result.stderr == ""
    got = json.loads(result.stdout)
    assert {name: got.get(name) for name in VALUES} == VALUES


def test_every_value_survives_a_locale_that_cannot_encode_it(release):
    code = "import os; print(os.environb[b'ASTRAL'].hex())"
    result = run_python(sys.executable, release, code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert bytes.fromhex(result.stdout).decode() == VALUES["ASTRAL"] and result.stderr == ""


def venv(python, folder):
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("python", interpreters())
def test_the_hidden_sitecustomize_of_a_venv_or_distribution_runs(python, release, tmp_path):
    inside = venv(python, tmp_path / "venv")
    site = subprocess.run(
        [inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    before = run_python(inside, release, "import sitecustomize as s; print(s.__file__)", PYTHONPATH="").stdout.strip()
    hook = pathlib.Path(site) / "sitecustomize.py"
    hook.write_text(
        "import os\nos.environ['HIDDEN_RAN'] = __name__ + ' ' + __file__\nos.environ['SAW'] = os.environ['PLAIN']\n"
    )
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "apport_python_hook.py").write_text("import os\ndef install():\n    os.environ['HIDDEN_RAN'] = 'apport'\n")
    code = "import os, sitecustomize as s; get = os.environ.get; print(s.__file__, get('HIDDEN_RAN'), get('SAW'))"
    result = run_python(inside, release, code, PYTHONPATH=f"{release / 'site'}:{hooks}")
    ours, ran, saw = re.fullmatch(r"(\S+) (.*) (\S+)\n", result.stdout).groups()
    assert ours == str(release / "site" / "sitecustomize.py") and result.stderr == ""
    if before:
        # Debian's own file comes before the one in the venv, with us as without us; it installs apport's hook.
        assert (ran, saw) == ("apport", "None")
    else:
        assert (ran, saw) == (f"sitecustomize {hook}", VALUES["PLAIN"])


def test_apport_hook_of_a_distribution_still_runs(release, tmp_path):
    behind = tmp_path / "dist"
    behind.mkdir()
    (behind / "sitecustomize.py").write_text(
        "try:\n    import apport_python_hook\nexcept ImportError:\n    pass\nelse:\n    apport_python_hook.install()\n"
    )
    (behind / "apport_python_hook.py").write_text(
        "import sys\ndef install():\n    sys.excepthook = lambda *a: print('apport')\n"
    )
    path = f"{release / 'site'}:{behind}"
    result = run_python(sys.executable, release, "import os; print(os.environ['PLAIN']); 1/0", PYTHONPATH=path)
    assert result.stdout.split() == ["2", "apport"]


def test_an_error_in_the_hidden_file_is_reported_as_python_does(release, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('broken hook')\n")
    alone = run_python(sys.executable, release, "print('goes on')", PYTHONPATH=str(tmp_path))
    ours = run_python(sys.executable, release, "print('goes on')", PYTHONPATH=f"{release / 'site'}:{tmp_path}")
    assert "broken hook" in alone.stderr
    assert (ours.stdout, ours.stderr) == (alone.stdout, alone.stderr)


def test_two_releases_on_the_path_do_not_call_each_other_for_ever(release, tmp_path):
    other = tmp_path / "site"
    shutil.copytree(release / "site", other)
    result = run_python(sys.executable, release, "print('fine')", PYTHONPATH=f"{release / 'site'}:{other}")
    assert (result.stdout, result.stderr) == ("fine\n", "")


def test_set_variables_win_and_are_noted(release):
    code = "import os, sitecustomize, watched; print(os.environ['PLAIN']); print(os.environ['EMPTY'])"
    watched = release.parent / "modules"
    watched.mkdir(exist_ok=True)
    (watched / "watched.py").write_text("")
    path = f"{release / 'site'}:{watched}"
    run = run_python(
        sys.executable,
        release,
        code + "; print(os.getpid())",
        PYTHONPATH=path,
        PLAIN="9",
        EMPTY="",
        SGLANG_DEPLOY_RELEASE=str(release),
    )
    plain, empty, pid = run.stdout.split("\n")[:3]
    assert (plain, empty, run.stderr) == ("9", "", "")
    note = json.loads((release / "run" / f"imports-{pid}.json").read_text())
    assert note["kept"] == ["PLAIN"]
    assert note["imports"]["watched"] == str(watched / "watched.py")
    assert note["pid"] == int(pid) and note["start"] > 0


def test_spawned_and_forked_workers_see_the_variables(release, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing, os\n"
        "def show(queue):\n"
        "    block = open('/proc/self/environ', 'rb').read()\n"
        "    queue.put((os.environ.get('PLAIN'), b'PLAIN=2' in block.split(b'\\0')))\n"
        "if __name__ == '__main__':\n"
        "    for method in ('spawn', 'fork'):\n"
        "        context = multiprocessing.get_context(method)\n"
        "        queue = context.Queue()\n"
        "        worker = context.Process(target=show, args=(queue,))\n"
        "        worker.start()\n"
        "        print(method, *queue.get())\n"
        "        worker.join()\n"
    )
    result = run_python(sys.executable, release, f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    # A forked worker has the variable but not in the block that /proc shows: verify must ask spawned workers.
    assert "fork 2 False" in result.stdout, result.stderr
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(release / "site")}
    output = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines() == ["spawn 2 True", "fork 2 False"]


def test_the_witness_never_breaks_an_import(release, tmp_path):
    (tmp_path / "watched.py").write_text("VALUE = 1\n")
    for marker in (str(tmp_path / "missing"), "/proc/none", ""):
        path = f"{release / 'site'}:{tmp_path}"
        result = run_python(
            sys.executable,
            release,
            "import watched; print(watched.VALUE)",
            PYTHONPATH=path,
            SGLANG_DEPLOY_RELEASE=marker,
        )
        assert (result.stdout, result.stderr) == ("1\n", "")


def test_a_missing_watched_module_stays_missing(release):
    code = "import importlib.util as u; print(u.find_spec('watched')); import watched"
    result = run_python(sys.executable, release, code, SGLANG_DEPLOY_RELEASE=str(release))
    assert result.stdout == "None\n" and "No module named 'watched'" in result.stderr


def test_three_runs_leave_the_file_untouched(tmp_path, repository):
    seen = []
    for _ in range(3):
        path, result = render(tmp_path, repository, {"A": "1", "B": "2"})
        assert result.returncode == 0, result.stdout
        file = path / "site" / "sitecustomize.py"
        seen.append((file.read_bytes(), file.stat().st_mtime_ns, "changed=1" in result.stdout))
    assert [item[2] for item in seen] == [True, False, False]
    assert len({item[:2] for item in seen}) == 1
    assert seen[0][0].count(b'"A": "1"') == 1


@pytest.mark.parametrize("variables", [{"A=B": "1"}, {"": "1"}, {"A": "x\0y"}])
def test_what_no_environment_can_hold_is_refused_by_name(tmp_path, repository, variables):
    path, result = render(tmp_path, repository, variables)
    assert result.returncode != 0
    text = " ".join((result.stdout + result.stderr).split())
    assert "nccl_env_variables: " in text and "neither name nor value has a NUL" in text
    assert not (path / "site" / "sitecustomize.py").exists()


def test_dry_run_on_a_host_without_the_release_shows_the_file(tmp_path, repository):
    path, _ = render(tmp_path, repository, {"A": "1"}, "--syntax-check")
    shutil.rmtree(path)
    (tmp_path / "play.yml").write_text(PLAY)
    environment = dict(os.environ, ANSIBLE_CONFIG=str(repository / "ansible.cfg"))
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "play.yml", "-e", "@vars.yml", "-CD"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and '+    "A": "1",' in result.stdout and str(path) in result.stdout
    assert not path.exists()


def test_start_costs_little(release):
    """The file may cost 5 ms of a start; what is measured is its own time, without the files that it runs."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "pass"], capture_output=True, text=True, check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(release / "site"), "SGLANG_DEPLOY_RELEASE": str(release)},
    )  # fmt: skip
    line = next(item for item in result.stderr.splitlines() if item.endswith("sitecustomize"))
    own = int(line.split(":")[1].split("|")[0])
    assert own < 5000 * 4, f"{own} microseconds; four times the limit, because the machine of a test run is busy"
