"""The name and options of a framework, as plain data in a case. Its behaviour is in `frameworks.base`."""

import functools
import importlib.util
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, ValidationError, ValidationInfo

from perfsuite import extensions
from perfsuite.documents import FROM_FILE, Data, did_you_mean, explain
from perfsuite.errors import CaseError, ExtensionError
from perfsuite.extensions import FRAMEWORKS, INSTALL, PERFSUITE, Extension

FOR_TESTS = frozenset({"fake"})
RESERVED = frozenset({"name", "package", "slug"})  # keys in a file that are not options of the framework

LossRule = Literal["falls", "finite"]
"""`falls`: every loss is a finite number, and the last steps have lower losses than the first.
`finite`: every loss is a finite number. With either rule, the loss curve must also match the baseline's."""


@dataclass(frozen=True, kw_only=True)
class Promises:
    """A framework's promises about every training with its options. The ranks' reports must confirm them."""

    builds_model: bool = True  # whether the framework builds the case's model. A script builds its own model
    ignores: frozenset[str] = frozenset({"lora", "quantization"})
    """Fields of a case that `build` ignores: a case that sets one of them is refused. A framework that calls
    `perfsuite.frameworks.common.model.build_model` supports all fields."""
    takes: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Field of a case -> the values that are supported. A case with another value is refused."""
    loss: LossRule | None = "falls"  # rule for losses. None: losses are not observed, and each run says so
    tokens_vary: bool = False  # whether the number of tokens varies between steps. If so, it is not checked
    # Whether the parameters of data-parallel ranks may differ. If not, a launch in which they differ fails.
    replicas_differ: bool = False


class FrameworkOptions(Data):
    """The name of a framework, and its options, which are the fields of this class.

    If two objects are equal, they describe the same training.
    """

    name: ClassVar[str] = ""
    """The name of the framework in cases, files and ids. Its entry point has the same name."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages that the framework imports in addition to torch and transformers. If one is missing, cases are
    skipped. The versions of these packages are recorded."""

    @property
    def promises(self) -> Promises:
        """The promises about every training with these options."""
        return Promises()

    def slug(self) -> str:
        """Return the framework's part of a case's id.

        It consists of the name, the required options, and the options that do not have their defaults.
        """
        return "-".join([self.name, *changed_fields(self)])


class MissingFramework(FrameworkOptions):
    """A framework that a file names, but that is broken or not installed here.

    Its cases can be read, but not run.
    """

    model_config = ConfigDict(extra="allow")
    package: ClassVar[str | None] = None  # the package that provided the framework when the file was written
    # The value of `slug` when the file was written. It is kept so that ids do not change.
    written_slug: ClassVar[str | None] = None
    promises: ClassVar[Promises] = Promises(builds_model=False, ignores=frozenset())

    def slug(self) -> str:
        """Return the slug in the file, because the defaults of options are unknown here."""
        return self.written_slug or self.name


def parse(value: Any, info: ValidationInfo) -> FrameworkOptions:
    """Return the framework of a case, given as an object, as its name, or as `{"name": ..., **options}`.

    Raises `CaseError` if no framework of that name is installed here, and `ExtensionError` if its package is
    broken. If the name comes from a file, the framework becomes a `MissingFramework` instead, so that old
    results remain readable.
    """
    if isinstance(value, FrameworkOptions):
        _check_findable(type(value))
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CaseError(f"give a framework as an object or by its name, got {value!r}")
    options = {key: option for key, option in value.items() if key not in RESERVED}
    name = value["name"]
    texts = (value.get(key) for key in ("package", "slug"))
    package, slug = (text if isinstance(text, str) else None for text in texts)
    is_from_file = info.context is not None and info.context.items() >= FROM_FILE.items()
    try:
        kind = framework_class(name)
        if kind is None and not is_from_file:
            raise CaseError(not_installed(name, package))
    except ExtensionError:
        if not is_from_file:
            raise
        kind = None
    kind = kind or _missing(name, package, slug)
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        fields = ", ".join(kind.model_fields) or "none"
        raise CaseError(f"{explain(error)}. Options of {name}: {fields}.") from None


def as_json(framework: FrameworkOptions) -> dict[str, Any]:
    """Return a dictionary that `parse` can read.

    If the framework comes from another package, the dictionary includes the package's name and the slug.
    """
    package = _package(type(framework))
    origin = {} if package is None else {"package": package, "slug": framework.slug()}
    return {"name": framework.name, **origin, **framework.model_dump()}


def framework_class(name: str) -> type[FrameworkOptions] | None:
    """Return the class of a framework, or None if it is not installed.

    Raises `ExtensionError` if the framework is broken.
    """
    extension = extensions.find(FRAMEWORKS, name)
    return None if extension is None else load(extension)


@functools.cache
def load(extension: Extension) -> type[FrameworkOptions]:
    """Load the class of a framework from its package.

    Raises `ExtensionError` if the class is not a framework, if its `name` differs from the name of its entry
    point, or if an option has a reserved name.
    """
    kind = extension.load()
    if not (isinstance(kind, type) and issubclass(kind, FrameworkOptions)):
        raise extension.error(f"{kind!r} is not a perfsuite.frameworks.Framework: derive it from that class")
    if kind.name != extension.name:
        raise extension.error(f"{kind.__name__}.name is {kind.name!r}: set it to {extension.name!r}")
    reserved = sorted(RESERVED & kind.model_fields.keys())
    if reserved:
        raise extension.error(f"rename its option {reserved[0]!r}, which is a reserved key in files")
    return kind


def not_installed(name: str, package: str | None = None) -> str:
    """Return the message for a framework that is not installed.

    The message gives the command that installs the framework, or lists the known names.
    """
    if package is not None:
        origin = f"the framework {name!r} comes from the package {package}"
        return f"{origin}, which is not installed: pip install {package}"
    if name.isidentifier() and importlib.util.find_spec(f"perfsuite.frameworks.{name}") is not None:
        return f"perfsuite has a framework {name!r} that its installed metadata do not list: {INSTALL}"
    installed = [framework for framework in extensions.names(FRAMEWORKS) if framework not in FOR_TESTS]
    return (
        f"unknown framework {name!r}.{did_you_mean(name.lower(), installed)} Known: {', '.join(installed)}. "
        "For another framework, pip install the package that provides it"
    )


def changed_fields(data: Data, skip: Set[str] = frozenset()) -> list[str]:
    """Return short readable texts for the fields that are required or differ from their defaults.

    The texts are in the order in which the class declares the fields.
    """
    parts = []
    for name, info in type(data).model_fields.items():
        if name in skip or (getattr(data, name) == info.default and not info.is_required()):
            continue
        match getattr(data, name):
            case bool() | None as value:
                parts.append(name if value else f"no_{name}")
            case str(value):
                parts.append(value.lower())
            case Data() as value:
                parts += [name, *changed_fields(value)]
            case tuple(value):
                parts.append(name + "x".join(map(str, value)))
            case Mapping() as value:
                parts.append(name + "x".join(f"{key}{of_key}" for key, of_key in value.items()))
            case float(value):
                parts.append(f"{name}{value}".removesuffix(".0"))
            case value:
                parts.append(f"{name}{value}")
    return parts


@functools.cache
def _check_findable(kind: type[FrameworkOptions]) -> None:
    """Raise an error if ranks would not find this class. Ranks get only the framework's name."""
    name = kind.name
    if issubclass(kind, MissingFramework):
        return
    extension = extensions.find(FRAMEWORKS, name)
    if extension is not None and extension.package == PERFSUITE and load(extension) is not kind:
        extension = extensions.of_others(FRAMEWORKS, name)  # raises an error if another package uses the name
    if extension is None and kind.__module__.startswith(f"perfsuite.frameworks.{name}"):
        raise CaseError(not_installed(name))
    if extension is None or load(extension) is not kind:
        raise CaseError(
            f"{kind.__name__} is defined in {kind.__module__}, but ranks do not find it as {name!r}. "
            f'Add [project.entry-points."{FRAMEWORKS}"] {name} = "{kind.__module__}:{kind.__name__}" '
            "to the pyproject.toml of its package, and install this package with `pip install -e` "
            "(docs/develop/extending.md). "
            "A training loop of your own does not need a framework, only a Script"
        )


@functools.cache
def _package(kind: type[FrameworkOptions]) -> str | None:
    if issubclass(kind, MissingFramework):
        return kind.package
    extension = extensions.find(FRAMEWORKS, kind.name)
    return None if extension is None or extension.package == PERFSUITE else extension.package


@functools.cache
def _missing(name: str, package: str | None, slug: str | None) -> type[MissingFramework]:
    # Each missing framework needs a class of its own, because `name` is an attribute of the class.
    values = {"__module__": __name__, "name": name, "package": package, "written_slug": slug}
    return type("MissingFramework", (MissingFramework,), values)
