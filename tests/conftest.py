"""One thread for every test and what it starts: models are tiny, and idle threads that spin cost minutes."""
import os

os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="Agg")
import filelock  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture
def alone(tmp_path_factory):
    """Tests that execute notebooks in this folder take turns, also in two processes (pytest -n 2)."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent      # of all processes
    with filelock.FileLock(folder / "notebooks.lock"):
        yield
