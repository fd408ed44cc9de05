"""Keeps libraries from printing into the live view."""

from __future__ import annotations

import logging
import warnings

CHATTY = (
    "bitsandbytes.backends.cpu.ops",  # looks for an optional package with a kernel for inference
    "torchao",  # names each of its GPU kernels that does not load; transformers imports it where it is installed
    "torch.utils._pytree",  # about torchao's own types
)


def quiet_libraries() -> None:
    """Turn off progress bars and advice of the libraries, which report what matters by exceptions.

    Call it before anything imports peft or bitsandbytes: some speak when they are imported.
    """
    # peft 0.21 asks transformers 5.24 by a name that goes in v6
    warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from datasets.utils.logging import disable_progress_bar
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bar()
