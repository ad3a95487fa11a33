import logging
import logging.config
import sys
import warnings

from tqdm import tqdm

logging.basicConfig(
    level=logging.DEBUG,
    format="%(levelname)s %(name)s %(funcName)s %(filename)s:%(lineno)d %(message)s",
    stream=sys.stdout,
)
log = logging.getLogger("my")
log.debug("debug")
for _ in tqdm(range(3), file=sys.stdout, disable=False, bar_format="{n}/{total}"):
    pass
logging.captureWarnings(True)
warnings.warn("captured", stacklevel=2)
warnings.warn("far", stacklevel=9)
logging.captureWarnings(False)
warnings.warn("told", UserWarning, stacklevel=1)
warnings.warn("old", DeprecationWarning, stacklevel=1)
logging.config.dictConfig({"version": 1, "disable_existing_loggers": True, "root": {"level": "INFO"}})
log.info("gone")
print(log.disabled, sorted(name for name in logging.root.manager.loggerDict if not name.startswith("my")))
