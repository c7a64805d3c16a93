"""A contract for import-linter: rooms enter each other through their packages' ``__init__``."""

from importlinter import Contract, ContractCheck, fields, output


class Doors(Contract):
    """No module of one room imports a private module of another; tests may.

    A room is a package directly below ``package``, or below ``package.jobs``. Private modules of
    ``package`` itself belong to every room.
    """

    type_name = "doors"
    package = fields.StringField()

    def check(self, graph, verbose):
        """Collect imports of ``room._module`` by modules of other rooms."""
        broken = [
            (importer, imported)
            for importer in sorted({self.package, *graph.find_descendants(self.package)})
            if not importer.endswith(("_test", ".conftest"))
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
            if self._is_private(imported) and self._room(importer) != self._room(imported)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check):
        """Name each import and the door that it passes by."""
        for importer, imported in check.metadata["broken"]:
            door = f"{self.package}.{self._room(imported)}"
            output.print_error(f"{importer} imports {imported}: export it in {door}", bold=False)

    def _room(self, module):
        parts = module.removeprefix(f"{self.package}.").split(".")
        return ".".join(parts[: 2 if parts[0] == "jobs" else 1])

    def _is_private(self, module):
        parts = module.removeprefix(f"{self.package}.").split(".")
        return module.startswith(f"{self.package}.") and any(p.startswith("_") for p in parts[1:])
