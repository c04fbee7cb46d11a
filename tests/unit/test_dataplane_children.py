"""Where children's sockets live."""

import os
import tempfile
from pathlib import Path

from megamcp.dataplane.children import SocketFolder


def test_the_folder_of_a_dead_gateway_is_removed_and_of_a_living_one_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / "megamcp-sockets-dead"
    dead.mkdir()
    (dead / "1.sock").touch()
    first = SocketFolder()
    assert not dead.exists()
    second = SocketFolder()
    assert Path(first.path).exists()
    assert first.next() != first.next()
    assert os.stat(first.path).st_mode & 0o077 == 0
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []
