"""The best values as a patch of an InferenceDeployment. Pure."""

from trimtab_engine.bench.autotune.space import Setting


def resource_patch(setting: Setting, *, name: str | None, namespace: str | None, about: str) -> str:
    """Return YAML for `kubectl patch --type merge --patch-file`, and with a name also for a server-side `kubectl
    apply`.

    A client-side apply would remove every field that the patch omits, so it is not suggested.
    """
    where = f" -n {namespace}" if namespace else ""
    lines = [f"# {line}" for line in about.splitlines()]
    lines.append(f"# kubectl patch infd {name or 'NAME'}{where} --type merge --patch-file FILE")
    if name is not None:
        lines += [
            "# kubectl apply --server-side --field-manager trimtab-autotune --force-conflicts -f FILE",
            "apiVersion: trimtab.dev/v1alpha1",
            "kind: InferenceDeployment",
            "metadata:",
            f"  name: {name}",
            *([f"  namespace: {namespace}"] if namespace else []),
        ]
    lines += [
        "spec:",
        "  engine:",
        f'    gpuMemoryUtilization: "{setting.gpu_memory_utilization:.2f}"',
        f"    maxNumSeqs: {setting.candidate.max_num_seqs}",
        f"    maxNumBatchedTokens: {setting.candidate.max_num_batched_tokens}",
    ]
    return "\n".join(lines) + "\n"
