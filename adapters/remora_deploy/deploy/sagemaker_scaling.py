"""Scaling of a SageMaker endpoint: the steps that set it up, take it away or restore it."""

from __future__ import annotations

from dataclasses import replace

from remora_deploy.deploy.plan import GONE, Call, State, Step, find
from remora_deploy.deploy.sagemaker_calls import Plan, scaled, scaling_of, wake_alarm


def scale_steps(plan: Plan, state: State) -> list[Step]:
    """Return the steps that set up scaling as requested, or take it away."""
    if plan.is_trial:
        return []
    if not plan.sized:
        taken = unscale_steps(plan.name, state) if instance_of(state, "config") != plan.instance else []
        return [replace(undo, extra=True) for step in taken for undo in step.undo]
    calls = scaling_of(plan)
    if not calls:
        return unscale_steps(plan.name, state)
    keep = {"put_scaling_policy": "wake"}  # the last one is the alarm's
    return [Step("deploy", call, keep=keep.get(call.operation, ""), extra=True) for call in calls]


def unscale_steps(name: str, state: State) -> list[Step]:
    """Return the steps that take scaling away, with which an instance type cannot change."""
    target = find(state, "scaling.ScalableTargets.0")
    if target is None:
        return []
    where = scaled(name)
    limits = {"MinCapacity": target.get("MinCapacity"), "MaxCapacity": target.get("MaxCapacity")}
    keys = (
        "PolicyName",
        "PolicyType",
        "TargetTrackingScalingPolicyConfiguration",
        "StepScalingPolicyConfiguration",
    )
    undo = [Step("deploy", Call("application-autoscaling", "register_scalable_target", {**where, **limits}))]
    for policy in find(state, "scaling_policies.ScalingPolicies", []):
        arguments = {**where, **{key: policy[key] for key in keys if policy.get(key)}}
        undo.append(Step("deploy", Call("application-autoscaling", "put_scaling_policy", arguments)))
    return [
        Step(
            "deploy",
            Call("application-autoscaling", "deregister_scalable_target", where),
            accepts=GONE,
            undo=tuple(undo),
        ),
        Step("deploy", Call("cloudwatch", "delete_alarms", {"AlarmNames": [wake_alarm(name)]})),
    ]


def instance_of(state: State, config: str) -> str:
    """Return the instance type of a configuration that was read."""
    return str(find(state, f"{config}.ProductionVariants.0.InstanceType", ""))
