"""The help text of a dataclass's field, ``field(metadata={"help": ...})``, as its documentation in the reference."""

import dataclasses
from importlib import import_module

import griffe


class HelpTexts(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs) -> None:
        if not any("metadata" in str(attribute.value) for attribute in cls.attributes.values()):
            return
        # Imported, because help texts are computed: they list the values that are allowed.
        for field in dataclasses.fields(getattr(import_module(cls.module.path), cls.name)):
            if (text := field.metadata.get("help")) is not None:
                attribute = cls.attributes[field.name]
                attribute.docstring = griffe.Docstring(text, parent=attribute)
                made = field.default_factory is not dataclasses.MISSING
                attribute.value = repr(field.default_factory() if made else field.default)
