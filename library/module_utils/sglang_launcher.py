"""Sources of the two small programs that a release holds, and the unit or program that runs it.

``watch.py`` is the one command of every service manager. It starts ``launch.py``, which replaces itself by the command
of ``launch.json`` with exactly that environment and account, so no value ever passes through the quoting of a unit file
and nothing leaks from the shell that started it.
``serve.py`` exists only with an API key: it gives the server the key inside the process.
"""

from __future__ import annotations

import shlex

LAUNCH_PY = '''\
"""Replace this process by the server that launch.json beside this file describes."""
import json
import os
import pwd
import resource
import signal
import sys

here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "launch.json"), encoding="utf-8") as handle:
    launch = json.load(handle)
argv = launch["argv"]
account = pwd.getpwnam(launch["user"]) if launch.get("user") else pwd.getpwuid(os.getuid())
env = {
    "PATH": os.path.dirname(argv[0]) + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": account.pw_dir,
    "USER": account.pw_name,
    "LANG": "C.UTF-8",
}
env.update(launch["env"])
# NCCL pins memory and SGLang opens many sockets: take all that the service manager allows.
for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (hard, hard))
if os.getuid() == 0 and account.pw_uid:
    os.initgroups(account.pw_name, account.pw_gid)
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
os.chdir(launch["cwd"])
signal.pthread_sigmask(signal.SIG_SETMASK, [])
if len(sys.argv) > 1:
    # The kernel ends the server with the watch that started it: nobody would look after it any more.
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("error: watch.py, which started this, is gone")
os.execve(argv[0], argv, env)
'''

SERVE_PY = '''\
"""Run sglang.launch_server with the API key of a file, so that the key is in no command line, environment or log.

The module level runs in the spawned workers too (as __mp_main__): every process of the server redacts its log records.
"""
import logging
import os
import sys

with open(os.environ["SGLANG_DEPLOY_API_KEY_FILE"], encoding="utf-8") as handle:
    key = handle.read().strip()
if not key:
    sys.exit("error: the API key file " + os.environ["SGLANG_DEPLOY_API_KEY_FILE"] + " is empty")
make_record = logging.getLogRecordFactory()


def redacted(*args, **kwargs):
    """Return a log record without the key; SGLang logs all its arguments at the start."""
    record = make_record(*args, **kwargs)
    text = record.getMessage()
    if key in text:
        record.msg, record.args = text.replace(key, "********"), ()
    return record


logging.setLogRecordFactory(redacted)

if __name__ == "__main__":
    import runpy

    sys.argv[1:] += ["--api-key", key]
    # __main__ stays this file, so that the workers load it as well.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
'''


def command(python, release):
    """Return the one command that a service manager runs, as a list; -I and -S keep other Python settings out."""
    return [python, "-I", "-S", f"{release}/watch.py"]


def supervisor_program(name, launch, stop_timeout, log_keep, log_max_mb):
    """Return the supervisor program of a release. A lone ``%`` would be an expansion, so it is doubled.

    :param stop_timeout: seconds between SIGTERM and SIGKILL.
    :param log_max_mb: size in MiB at which the log is rotated while the server runs.
    """
    lines = [
        f"[program:{name}]",
        f"command={shlex.join(command(launch['argv'][0], launch['cwd']))}",
        f"directory={launch['cwd']}",
    ]
    lines += [
        # watch.py decides about restarts, the same under every service manager, and launch.py changes the account.
        "autostart=false",
        # An exit code is watch.py's last word. A signal is its own death: the next one decides about the server.
        "autorestart=unexpected",
        f"exitcodes={','.join(map(str, range(256)))}",
        # What ends within a second is not started again.
        "startretries=0",
        "startsecs=1",
        # watch.py hands SIGTERM to the server alone, which drains its requests; what is left is killed with it.
        "stopsignal=TERM",
        f"stopwaitsecs={int(stop_timeout)}",
        "stopasgroup=false",
        "killasgroup=true",
        "redirect_stderr=true",
        f"stdout_logfile={launch['log']}",
        f"stdout_logfile_maxbytes={int(log_max_mb)}MB",
        f"stdout_logfile_backups={int(log_keep)}",
    ]
    return "\n".join(line.replace("%", "%%") for line in lines) + "\n"


def systemd_unit(name, launch, stop_timeout):
    """Return the systemd unit of a release. A lone ``%`` would be a specifier, so it is doubled."""

    def word(value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"'

    main = " ".join(word(item) for item in command(launch["argv"][0], launch["cwd"]))
    lines = [
        "[Unit]",
        f"Description=SGLang server {name}, release {launch['release']}",
        "After=network-online.target",
        "Wants=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={main}",
        f"WorkingDirectory={launch['cwd']}",
    ]
    if launch["user"]:
        lines.append(f"# watch.py keeps the ledger and starts the server as {launch['user']}.")
    lines += [
        # watch.py decides about restarts, the same under every service manager. An exit code is its last word; a signal
        # is its own death, and the next one decides about the server, after it was told which signal it was.
        "Restart=on-abnormal",
        "RestartSec=1",
        f"ExecStopPost=-{main} tell",
        # One worker killed for want of memory is watch.py's to see; systemd would stop the whole unit.
        "OOMPolicy=continue",
        # watch.py hands SIGTERM to the server alone, which drains its requests; what is left is killed with the cgroup.
        "KillMode=mixed",
        "KillSignal=SIGTERM",
        "SendSIGKILL=yes",
        f"TimeoutStopSec={int(stop_timeout)}",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        f"StandardOutput=append:{launch['log']}",
        f"StandardError=append:{launch['log']}",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(line.replace("%", "%%") for line in lines) + "\n"


def supervisord_conf(service_dir, user, max_files):
    """Return the configuration of the supervisord of one root.

    :param service_dir: ``<root>/service``; socket, pid file and log lie in it.
    :param user: name of the user that runs supervisord when it is root, else empty.
    :param max_files: open files that supervisord asks for.
    """
    lines = [
        "[unix_http_server]",
        f"file={service_dir}/supervisor.sock",
        "chmod=0700",
        "",
        "[supervisord]",
        f"logfile={service_dir}/supervisord.log",
        "logfile_maxbytes=10MB",
        "logfile_backups=3",
        f"pidfile={service_dir}/supervisord.pid",
        f"childlogdir={service_dir}",
        f"minfds={int(max_files)}",
    ]
    if user:
        lines.append(f"user={user}")
    lines += [
        "",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        "",
        "[supervisorctl]",
        f"serverurl=unix://{service_dir}/supervisor.sock",
        "",
        "[include]",
        f"files={service_dir}/program.conf",
    ]
    return "\n".join(line.replace("%", "%%") for line in lines) + "\n"
