"""What becomes of the embedded state cluster's folder when the machine went down while it ran without fsync."""

from pathlib import Path

import pytest

from megamcp.databases import clusters


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    boot = tmp_path / "boot_id"
    boot.write_text("this boot\n")
    monkeypatch.setattr(clusters, "BOOT", boot)
    state = tmp_path / "data" / "state"
    state.mkdir(parents=True)
    (state / "file").write_text("rows")
    return state


def test_a_folder_that_was_in_use_at_another_boot_is_set_aside(folder: Path) -> None:
    clusters._mark(folder).write_text("an earlier boot")
    clusters._set_aside(folder)
    assert not folder.exists()
    (aside,) = folder.parent.glob("state.lost-*")
    assert (aside / "file").read_text() == "rows"


def test_a_folder_that_was_in_use_at_this_boot_stays(folder: Path) -> None:
    clusters._set_aside(folder)
    clusters._set_aside(folder)
    assert (folder / "file").exists()


def test_a_folder_that_was_closed_in_order_stays_over_a_boot(folder: Path) -> None:
    assert not clusters._mark(folder).exists()
    clusters._set_aside(folder)
    assert (folder / "file").exists()
