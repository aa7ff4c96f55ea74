"""One thread for every test and what it starts: models are tiny, and idle threads that spin cost minutes."""
import os

os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="Agg")
import torch  # noqa: E402

torch.set_num_threads(1)
