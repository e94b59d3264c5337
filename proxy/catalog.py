"""Names of models: ids and aliases, resolved in one place. Pure."""

from collections.abc import Collection, Mapping

from proxy.settings import Model


class Catalog:
    """Resolves what clients call a model to its configured id."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models: dict[str, Model] = {}
        self._ids: dict[str, str] = {}
        self._leaving: frozenset[str] = frozenset()
        self.replace(models)

    def replace(self, models: Mapping[str, Model], leaving: Collection[str] = ()) -> None:
        """Take other models, all at once.

        `leaving` are those of them that go once their last request has ended. A name that one of the others has by
        now means that one, except for the id: it means the model that has it, until that is gone.
        """
        self._models, self._leaving = dict(models), frozenset(leaving)
        self._ids = {name: name for name in models}
        for name in sorted(models, key=self._leaving.__contains__):
            for alias in models[name].aliases:
                self._ids.setdefault(alias, name)

    def drop(self, model_id: str) -> None:
        """Let go of a model; its names are free."""
        models = {name: model for name, model in self._models.items() if name != model_id}
        self.replace(models, self._leaving)

    def resolve(self, name: str) -> str | None:
        """Return the model id for an id or alias, None when unknown."""
        return self._ids.get(name)

    def only(self) -> str | None:
        """Return the id when exactly one model exists (and stays): requests may then leave the name out."""
        staying = [name for name in self._models if name not in self._leaving]
        return staying[0] if len(staying) == 1 else None

    def model(self, model_id: str) -> Model:
        """Return a model's settings; `KeyError` for an unknown id."""
        return self._models[model_id]

    def ids(self) -> tuple[str, ...]:
        """Return all ids in configuration order."""
        return tuple(self._models)
