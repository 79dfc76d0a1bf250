# Instances follow the requests under way, not the processor: a batch that waits uses none.

locals {
  scales = contains(["realtime", "async", "multi-model"], var.mode)
}

resource "aws_appautoscaling_target" "variant" {
  count              = local.scales ? 1 : 0
  service_namespace  = "sagemaker"
  scalable_dimension = "sagemaker:variant:DesiredInstanceCount"
  # Through the endpoint, which is there only once it is in service: a target that comes earlier is refused.
  resource_id  = "endpoint/${aws_sagemaker_endpoint.this.name}/variant/${local.variant}"
  min_capacity = var.capacity.min
  max_capacity = var.capacity.max
  tags         = var.tags

  lifecycle {
    # Deregistered before the endpoint moves to another instance type, and registered again after it.
    replace_triggered_by = [terraform_data.fleet]
  }
}

resource "aws_appautoscaling_policy" "concurrency" {
  count              = contains(["realtime", "multi-model"], var.mode) ? 1 : 0
  name               = "${var.name}-concurrency"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.variant[0].service_namespace
  scalable_dimension = aws_appautoscaling_target.variant[0].scalable_dimension
  resource_id        = aws_appautoscaling_target.variant[0].resource_id

  target_tracking_scaling_policy_configuration {
    target_value       = var.target_concurrency
    scale_in_cooldown  = var.cooldown_seconds.in
    scale_out_cooldown = var.cooldown_seconds.out
    predefined_metric_specification {
      predefined_metric_type = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    }
  }

  lifecycle {
    # Application Auto Scaling deletes the policies of a target that is deregistered.
    replace_triggered_by = [aws_appautoscaling_target.variant]
  }
}

# Asynchronous requests wait in a queue: its length for each instance is what there is to do.
resource "aws_appautoscaling_policy" "backlog" {
  count              = var.mode == "async" ? 1 : 0
  name               = "${var.name}-backlog"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.variant[0].service_namespace
  scalable_dimension = aws_appautoscaling_target.variant[0].scalable_dimension
  resource_id        = aws_appautoscaling_target.variant[0].resource_id

  target_tracking_scaling_policy_configuration {
    target_value       = var.async.target_backlog
    scale_in_cooldown  = var.cooldown_seconds.in
    scale_out_cooldown = var.cooldown_seconds.out
    customized_metric_specification {
      namespace   = "AWS/SageMaker"
      metric_name = "ApproximateBacklogSizePerInstance"
      statistic   = "Average"
      dimensions {
        name  = "EndpointName"
        value = aws_sagemaker_endpoint.this.name
      }
    }
  }

  lifecycle {
    # Application Auto Scaling deletes the policies of a target that is deregistered.
    replace_triggered_by = [aws_appautoscaling_target.variant]
  }
}

# Other limits at other times. An apply in between sets those of `capacity` until the next action.
resource "aws_appautoscaling_scheduled_action" "capacity" {
  for_each           = local.scales ? var.schedule : {}
  name               = "${var.name}-${each.key}"
  service_namespace  = aws_appautoscaling_target.variant[0].service_namespace
  scalable_dimension = aws_appautoscaling_target.variant[0].scalable_dimension
  resource_id        = aws_appautoscaling_target.variant[0].resource_id
  schedule           = each.value.at
  timezone           = each.value.timezone

  scalable_target_action {
    min_capacity = each.value.min
    max_capacity = each.value.max
  }

  lifecycle {
    # Application Auto Scaling deletes the actions of a target that is deregistered.
    replace_triggered_by = [aws_appautoscaling_target.variant]
  }
}

# A backlog for each of no instances has no value: a separate alarm starts the first instance.
resource "aws_appautoscaling_policy" "wake" {
  count              = var.mode == "async" && var.capacity.min == 0 ? 1 : 0
  name               = "${var.name}-wake"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.variant[0].service_namespace
  scalable_dimension = aws_appautoscaling_target.variant[0].scalable_dimension
  resource_id        = aws_appautoscaling_target.variant[0].resource_id

  step_scaling_policy_configuration {
    adjustment_type         = "ChangeInCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = var.cooldown_seconds.out
    step_adjustment {
      metric_interval_lower_bound = 0
      scaling_adjustment          = 1
    }
  }

  lifecycle {
    # Application Auto Scaling deletes the policies of a target that is deregistered.
    replace_triggered_by = [aws_appautoscaling_target.variant]
  }
}

resource "aws_cloudwatch_metric_alarm" "wake" {
  count               = length(aws_appautoscaling_policy.wake)
  alarm_name          = "${var.name}-wake"
  alarm_description   = "Requests wait for ${var.name}, and no instance is there."
  namespace           = "AWS/SageMaker"
  metric_name         = "HasBacklogWithoutCapacity"
  dimensions          = { EndpointName = aws_sagemaker_endpoint.this.name }
  statistic           = "Average"
  period              = 60
  evaluation_periods  = 1
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  treat_missing_data  = "missing"
  alarm_actions       = [aws_appautoscaling_policy.wake[0].arn]
  tags                = var.tags
}
