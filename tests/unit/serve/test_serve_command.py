"""The command: it says where it serves, answers, and lets what runs end after SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.support.serving import speaking_model


def test_the_command_serves_and_drains(tmp_path: Path) -> None:
    model = speaking_model(tmp_path)
    command = [sys.executable, "-m", "onboard", "serve", str(model.checkpoint), "--root"]
    command += [str(model.root), "--device", "cpu", "--port", "0", "--name", "tiny"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:")
        address = line.split()[3].rstrip(",")
        body = {"prompt": "the cat", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            threading.Timer(0.1, process.send_signal, [signal.SIGTERM]).start()
            rest = [each for each in lines if each]
        assert rest[-1] == "data: [DONE]", "it was cut off"
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()
