"""Virtual environments of peers, which need other versions of packages than this project does.

Made once, under `benchmarks/.venvs` (ignored by git), with the newest release that pip finds; delete the folder to get
a newer one. Raises `Missing` with the reason where that can't be done: the benchmark then goes on without the peer.
"""

import asyncio
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".venvs"
INSTALL_PATIENCE_S = 300


class Missing(Exception):
    """This peer can't be had here; the text says why."""


async def environment(name: str, *packages: str) -> Path:
    """The Python of an environment with these packages."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if done.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    try:
        await _run(sys.executable, "-m", "venv", str(folder))
        await _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    done.touch()
    return python


async def version(python: Path, package: str) -> str:
    """The version of a package that an environment holds."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return await _run(str(python), "-c", program)


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        told, _ = await asyncio.wait_for(process.communicate(), INSTALL_PATIENCE_S)
    except TimeoutError:
        raise Missing(f"{' '.join(command[:4])} … took more than {INSTALL_PATIENCE_S} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = told.decode(errors="replace").strip()
    if process.returncode:
        lines = text.splitlines() or [f"exit status {process.returncode}"]
        raise Missing(lines[-1])
    return text
