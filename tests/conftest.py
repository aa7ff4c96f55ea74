"""One thread for every test and the processes it starts: the models are tiny, and idle threads that spin cost minutes on a busy machine."""
import os

os.environ.update(OMP_NUM_THREADS="1", MPLBACKEND="Agg")
import torch  # noqa: E402

torch.set_num_threads(1)
