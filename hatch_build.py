"""Puts the patch series into wheels; an editable install reads it from the checkout."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PatchSeriesHook(BuildHookInterface[Any]):
    """Adds `native-patch/` to a wheel as `proxy/_native_patch`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        if version != "editable":
            build_data["force_include"]["native-patch"] = "proxy/_native_patch"
