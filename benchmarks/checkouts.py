"""The package of another checkout, beside this one in the same process."""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

NAME = "slamb_jax"


def package(root: Path) -> ModuleType:
    """The package under ``root``, whose modules know each other and not this one's.

    All of them are imported while that directory comes first, since a
    function's later import would find this checkout's.
    """
    ours = _taken_out()
    sys.path.insert(0, str(root.resolve()))
    importlib.invalidate_caches()
    try:
        other = importlib.import_module(NAME)
        if Path(str(other.__file__)).parents[1] != root.resolve():
            raise ValueError(f"{str(root)!r} is no checkout: it has no {NAME}/")
        for module in pkgutil.walk_packages(other.__path__, f"{NAME}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    finally:
        sys.path.pop(0)
        _taken_out()
        sys.modules |= ours
    return other


def _taken_out() -> dict[str, ModuleType]:
    """The package's modules, which the next import will not find."""
    names = [x for x in sys.modules if x.partition(".")[0] == NAME]
    return {name: sys.modules.pop(name) for name in names}
