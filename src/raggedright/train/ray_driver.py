"""The driver of a run on Ray in a process of its own, because Ray ends its driver's process when Ray itself dies.

The command starts the driver, passes signals on to it by the run folder's `stop` file, and says in one sentence what
ended it. Where that is Ray, not the run (its Train controller, a raylet or the GCS died), a new driver resumes from the
last checkpoint, up to `parallel.max_restarts` times; what the old one had on the cluster ends with it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ray.exceptions import RayError

from raggedright.config.load import load_config
from raggedright.config.schema import Config
from raggedright.errors import RaggedRightError
from raggedright.train.rank import CONFIG_FILE, end_with_launcher, log_file
from raggedright.train.ray_launch import launch_on_ray
from raggedright.train.stop import passing_on_signals
from raggedright.train.world import TrainError


def run_driver(config: Config) -> None:
    """Run the driver, and start it again where Ray died, to the end of the run."""
    restarts = config.parallel.max_restarts
    with passing_on_signals(config.out):
        failure = _run_once(config)
        for restart in range(1, restarts + 1):
            if failure is None:
                return
            print(f"{failure}; starting the driver again ({restart} of {restarts} restarts)", flush=True)
            failure = _run_once(config)
    if failure is not None:
        raise TrainError(f"{failure}; start Ray again if it was started apart, and run the same command to resume")


def _run_once(config: Config) -> str | None:
    """Run one driver to its end; how Ray ended it, or None. What ended the run itself is raised."""
    with TemporaryDirectory(prefix="raggedright-") as name:  # only this user can open it
        file = Path(name) / "error.json"
        command = [sys.executable, "-m", "raggedright.train.ray_driver", str(config.out), str(file)]
        driver = subprocess.Popen(command, start_new_session=True)
        try:
            code = driver.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # whatever of a Ray of its own is left
        if code == 0:
            return None
        if not file.exists():
            return f"Ray ended the driver (exit code {code}): its raylet or GCS died, see Ray's logs"
        error = json.loads(file.read_text())
    if error["by_ray"]:
        return str(error["message"])
    raise TrainError(error["message"])


def main() -> int:
    """The process of the driver; what ends it goes to the file that the command named."""
    end_with_launcher()
    folder, file = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        launch_on_ray(load_config(folder / CONFIG_FILE, {"out": folder}))
    except Exception as error:
        by_ray = isinstance(error, RayError)
        message = str(error)
        if by_ray:
            part = re.search(r"class_name: (\w+)", message)
            message = f"Ray's {part[1]} died" if part else f"Ray failed: {' '.join(message.split()):.200}"
        elif not isinstance(error, RaggedRightError):
            with log_file(folder, 0).open("a") as log:
                log.write(traceback.format_exc())
            message = f"{type(error).__name__}: {message}; its traceback is in {log_file(folder, 0)}"
        file.write_text(json.dumps({"by_ray": by_ray, "message": message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
