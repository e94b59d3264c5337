"""Names of models: ids and aliases, resolved in one place. Pure."""

from collections.abc import Mapping

from proxy.settings import Model


class Catalog:
    """Resolves what clients call a model to its configured id."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models: dict[str, Model] = {}
        self._ids: dict[str, str] = {}
        self.replace(models)

    def replace(self, models: Mapping[str, Model]) -> None:
        """Take other models, all at once."""
        self._models = dict(models)
        self._ids = {name: name for name in models}
        for name, model in models.items():
            self._ids.update(dict.fromkeys(model.aliases, name))

    def resolve(self, name: str) -> str | None:
        """Return the model id for an id or alias, None when unknown."""
        return self._ids.get(name)

    def only(self) -> str | None:
        """Return the id when exactly one model exists: requests may then leave the name out."""
        return next(iter(self._models)) if len(self._models) == 1 else None

    def model(self, model_id: str) -> Model:
        """Return a model's settings; `KeyError` for an unknown id."""
        return self._models[model_id]

    def ids(self) -> tuple[str, ...]:
        """Return all ids in configuration order."""
        return tuple(self._models)
