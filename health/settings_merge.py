"""Tables of robust.toml laid over the defaults, key by key; what does not fit becomes a problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from health.check import Check, Setting
from health.finding import ACTIONS

Tables = Mapping[str, Mapping[str, Setting]]


class Numbers(dict[str, dict[str, float]]):
    """A default that stands for tables of numbers, by names that the site chooses."""


class Commands(dict[str, dict[str, Any]]):
    """A default that stands for the site's own commands, by names that it chooses."""


COMMAND: dict[str, Any] = {  # each key's default; argv has none
    "where": ["prolog", "epilog", "sweep"],
    "deadline": 1.0,
    "class": "node",
    "action": "none",
}


class Merge:
    """``tables`` and ``families`` begin with the defaults; ``add`` overrides them key by key.

    ``wrong`` says what is wrong with a value of a table beyond its type ("": nothing).
    """

    def __init__(
        self, tables: Tables, checks: Iterable[Check], wrong: Callable[[str, str, Any], str]
    ) -> None:
        self._known = tables
        self._checks = {check.name: check.settings for check in checks}
        self._wrong = wrong
        self.tables = {name: defaults(keys) for name, keys in tables.items()}
        self.families = {name: defaults(keys) for name, keys in self._checks.items()}
        self.xid: dict[str, str] = {}
        self.problems: list[str] = []

    def add(self, found: Mapping[str, Any], origin: str, node: str) -> None:
        for name, table in found.items():
            if name == "nodes" and not origin:
                continue
            if not isinstance(table, dict):
                if origin:  # at the top level such keys are robust-srun's
                    self._say(f"{origin}.{name}", "is not a table")
            elif name == "health":
                self._health(table, f"{origin}.health" if origin else "health")
            elif name == "xid":
                self._xid(table, f"{origin}.xid" if origin else "xid")
            elif name in self._known:
                where = f"{origin}.{name}" if origin else name
                for key, value in table.items():
                    self._key(self.tables[name], self._known[name], name, key, value, where)
            else:
                known = [*self._known, "health", "xid", "nodes"]
                self._unknown(f"{origin}.{name}" if origin else name, name, known)
        if not origin and "nodes" in found:  # after the tables for all nodes, wherever it stands
            self._nodes(found["nodes"], node)

    def _nodes(self, table: Any, node: str) -> None:
        from robust_slurm.hostlist import contains

        if not isinstance(table, dict):
            self._say("nodes", "is not a table")
            return
        for expression, tables in table.items():
            origin = f'nodes."{expression}"'
            try:
                inside = contains(expression, node)
            except ValueError as err:
                self._say(origin, f"is not a list of hosts: {err}")
                continue
            if not isinstance(tables, dict):
                self._say(origin, "is not a table")
            elif inside:
                self.add(tables, origin, node)

    def _health(self, table: Mapping[str, Any], origin: str) -> None:
        for family, keys in table.items():
            if family not in self._checks:
                self._unknown(f"{origin}.{family}", family, list(self._checks))
            elif not isinstance(keys, dict):
                self._say(f"{origin}.{family}", "is not a table")
            else:
                for key, value in keys.items():
                    mine = self.families[family]
                    self._key(mine, self._checks[family], "", key, value, f"{origin}.{family}")

    def _xid(self, table: Mapping[str, Any], origin: str) -> None:
        for code, action in table.items():
            if not (code.isascii() and code.isdigit() and len(code) <= 6):
                self._say(f"{origin}.{code}", "is not the number of an Xid")
            elif not isinstance(action, str) or action not in ACTIONS:
                self._say(f"{origin}.{code}", f"{action!r} is none of {', '.join(ACTIONS)}")
            else:
                self.xid[str(int(code))] = action

    def _key(
        self,
        into: dict[str, Any],
        known: Mapping[str, Setting],
        table: str,
        key: str,
        value: Any,
        where: str,
    ) -> None:
        if key not in known:
            self._unknown(f"{where}.{key}", key, list(known))
            return
        fits, wrong = fit(value, known[key].default)
        wrong = wrong or self._wrong(table, key, fits)
        if wrong:
            self._say(f"{where}.{key}", f"= {value!r}: {wrong}; {into[key]!r} stays")
        else:
            into[key] = fits

    def _unknown(self, where: str, name: str, known: list[str]) -> None:
        import difflib

        close = difflib.get_close_matches(name, known, 1)
        self._say(where, "is unknown" + (f"; did you mean {close[0]}?" if close else ""))

    def _say(self, where: str, what: str) -> None:
        self.problems.append(f"[{where}] {what}")


def defaults(keys: Mapping[str, Setting]) -> dict[str, Any]:
    return {key: _copy(setting.default) for key, setting in keys.items()}


def _copy(value: Any) -> Any:
    return type(value)(value) if isinstance(value, list | dict) else value


def fit(value: Any, default: Any) -> tuple[Any, str]:
    """The value in the default's type, and what is wrong with it ("": nothing)."""
    if isinstance(default, bool):
        return value, "" if isinstance(value, bool) else "use true or false"
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value, "not a number"
        if not abs(value) < 1e15:  # also false for nan
            return value, "not a usable number"
        return float(value), ""
    if isinstance(default, int):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value, "" if whole and abs(value) < 1 << 62 else "not a whole number"
    if isinstance(default, str):
        return value, "" if isinstance(value, str) else "not a string"
    if isinstance(default, Commands):
        return _fit_commands(value)
    if isinstance(default, Numbers):
        return _fit_numbers(value)
    if isinstance(default, dict):
        return _fit_table(value, default)
    strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value, "" if strings else "not a list of strings"


def _fit_table(value: Any, default: Mapping[str, Any]) -> tuple[Any, str]:
    if not isinstance(value, dict):
        return value, "not a table"
    like = next(iter(default.values()), None)
    out = {}
    for key, item in value.items():
        out[key], wrong = (item, "") if like is None else fit(item, like)
        if like is None and not isinstance(item, str | int | float):
            wrong = "neither a string nor a number"
        if wrong:
            return value, f"{key}: {wrong}"
    return out, ""


def _fit_numbers(value: Any) -> tuple[Any, str]:
    if not isinstance(value, dict):
        return value, "not a table"
    out = Numbers()
    for name, table in value.items():
        if not isinstance(table, dict):
            return value, f"{name}: not a table of numbers"
        out[name] = {}
        for key, item in table.items():
            out[name][key], wrong = fit(item, 0.0)
            if wrong or item < 0:
                return value, f"{name}.{key}: {wrong or 'must not be below 0'}"
    return out, ""


def _fit_commands(value: Any) -> tuple[Any, str]:
    if not isinstance(value, dict):
        return value, "not a table"
    out = Commands()
    for name, table in value.items():
        if not isinstance(table, dict):
            return value, f"{name}: not a table"
        wrong = _wrong_command(name, table)
        if wrong:
            return value, f"{name}: {wrong}"
        out[name] = {**COMMAND, **table}
    return out, ""


def _wrong_command(name: str, table: Mapping[str, Any]) -> str:
    if not re.fullmatch(r"[a-z0-9-]{1,32}", name):
        return "a name may have lower-case letters, digits and -, at most 32 characters"
    unknown = set(table) - set(COMMAND) - {"argv"}
    if unknown:
        return f"unknown: {', '.join(sorted(unknown))}"
    argv = table.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return "argv: not a list of strings"
    if argv[0][:1] != "/":
        return f"argv: {argv[0]!r} is not an absolute path"
    for key, default in COMMAND.items():
        wrong = fit(table[key], default)[1] if key in table else ""
        if wrong:
            return f"{key}: {wrong}"
    known = {**COMMAND, **table}
    if not set(known["where"]) <= set(COMMAND["where"]):
        return f"where: use {', '.join(COMMAND['where'])}"
    if known["deadline"] <= 0:
        return "deadline: must be above 0"
    if known["class"] not in ("node", "user"):
        return "class: use node, user"
    if known["action"] not in ACTIONS:
        return f"action: {known['action']!r} is none of {', '.join(ACTIONS)}"
    return ""
