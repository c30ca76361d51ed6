"""Findings about Megatron's seams, the installed strategies, and the form of the planning kernels."""

from megatron_fssdp.config.strategy.strategy_registry import SHIPPED, STRATEGIES
from megatron_fssdp.megatron_adapter.diagnosis.finding import Finding, note, problem
from megatron_fssdp.megatron_adapter.support import capabilities
from megatron_fssdp.megatron_adapter.support.broken_packages import one_line
from megatron_fssdp.megatron_adapter.support.tested_versions import pip_install
from megatron_fssdp.planning.native.kernel import REBUILD, kernel_form


def check_seams(has_megatron: bool) -> list[Finding]:
    """Return a finding for the number of seams in the installed Megatron, and one for each missing seam."""
    check = "Megatron's seams"
    if not has_megatron:
        return [note(check, "not checked, because Megatron cannot be imported")]
    seams, missing = capabilities.SEAMS, []
    for seam in seams:
        reason: Exception | None
        try:
            reason = capabilities.absence(seam)
        except Exception as raised:  # A module of Megatron may raise any error when it is imported.
            reason = raised
        if reason is None:
            continue
        name, found = f"seam {seam.path}", f"not in {seam.module} ({one_line(reason)})"
        use = f"here the plugin {seam.purpose}, for {seam.needed_by}"
        if seam.is_optional:
            missing.append(note(name, found, f"{use}; other runs do not need it"))
        else:
            advice = f"no run starts without it: install a tested release: {pip_install('megatron-core')}"
            missing.append(problem(name, found, f"{use}; {advice}"))
    num_found = len(seams) - len(missing)
    found = f"found {num_found} of {len(seams)} functions and classes that the plugin attaches to"
    return [Finding(check, found), *missing]


def check_strategies() -> list[Finding]:
    """Return a finding for all installed strategies, and one for each that cannot be used."""
    packages = [(name, entry.package) for name, entry in STRATEGIES.items()]
    of_others = [f", {name} from {package}" for name, package in packages if package != SHIPPED]
    findings = [Finding("strategies", f"{len(packages) - len(of_others)} from {SHIPPED}{''.join(of_others)}")]
    for broken in STRATEGIES.broken.values():
        found = f"from {broken.package}, cannot be used: {broken.reason}"
        advice = f"update the package, or remove it: pip uninstall {broken.package}; other strategies work"
        findings.append(note(f"strategy {broken.name}", found, advice))
    return findings


def check_kernels() -> Finding:
    """Say in which form planning kernels run; both forms give the same plans."""
    form = kernel_form()
    if form.is_compiled:
        return Finding("planning kernels", "compiled")
    advice = (
        "planning takes longer; install a C compiler and Python's headers, then install megatron-fssdp again "
        f"(in a checkout: {REBUILD})"
    )
    return note("planning kernels", str(form), advice)
