"""What happens when a kernel cannot be built or launched: an error under `strict`, else the segment as ATen.

Enters: the segment, where it comes from and how to write its repro.  Leaves: the function that a launcher calls
with the exception.  It warns once per segment and names the repro file.
"""

from __future__ import annotations

import threading
import warnings
from typing import Callable

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.errors import FallbackWarning, LoweringError, OutOfRange, Site
from fxfuser.runtime import repro
from fxfuser.segmenter.segment import Segment

ReproText = Callable[[str], str]  # reason -> source


def on_failure(segment: Segment, config: Config, repro_text: ReproText) -> Callable[[Exception], bool]:
    """The launcher's `failed`: raises LoweringError under `config.strict`, else warns once and answers False.

    Positions out of range are the user's error, not the kernel's: there is no warning, and ATen refuses them itself.
    """
    warned = threading.Event()

    def failed(error: Exception) -> bool:
        if isinstance(error, OutOfRange) and config.strict:
            raise OutOfRange(error.reason, Site.of(segment.outputs[0], segment.name)) from error
        if isinstance(error, OutOfRange) or (warned.is_set() and not config.strict):
            return False
        found = error_of(segment, config, repro_text, error)
        if config.strict:
            raise found from error
        warned.set()
        warnings.warn(FallbackWarning(found), stacklevel=4)
        observe.record(observe.FallbackRecord(segment.name, str(found), found.site.dump))
        return False

    return failed


def error_of(segment: Segment, config: Config, repro_text: ReproText, error: Exception) -> LoweringError:
    """The error with the segment's place in the model and the path of a repro file."""
    reason = f"{type(error).__name__}: {error}".strip()
    path = repro.write(config.cache_dir, segment.name, repro_text(reason))
    if isinstance(error, LoweringError):
        return error.at(segment.name, path)
    return LoweringError(reason, Site.of(segment.outputs[0], segment.name, path),
                         "run the dumped file; report it together with this message")
