# The endpoint's configuration comes from CloudFormation, for two values that provider 5.100 refuses: the AMI with CUDA 13,
# and a variant without a model, which is what carries an inference component. tests/infra holds the properties against
# the service's own model.

locals {
  serverless = var.mode == "serverless"
  # What has no value for a mode is null, and left out.
  variant_settings = { for key, value in {
    VariantName          = local.variant
    InitialVariantWeight = local.component ? null : 1
    ServerlessConfig     = local.serverless ? { MemorySizeInMB = var.serverless.memory_mb, MaxConcurrency = var.serverless.max_concurrency } : null

    InstanceType                                = local.serverless ? null : var.instance_type
    InitialInstanceCount                        = local.serverless ? null : max(coalesce(var.capacity.initial, var.capacity.min), 1)
    InferenceAmiVersion                         = local.serverless ? null : local.ami
    ContainerStartupHealthCheckTimeoutInSeconds = local.serverless ? null : var.startup_timeout_seconds.health_check
    ModelDataDownloadTimeoutInSeconds           = local.serverless ? null : var.startup_timeout_seconds.download

    ManagedInstanceScaling = local.component ? { Status = "ENABLED", MinInstanceCount = var.capacity.min, MaxInstanceCount = var.capacity.max } : null
    # Batches form where requests wait together, and the instance with the fewest under way is the soonest free.
    RoutingConfig = contains(["realtime", "scale-to-zero"], var.mode) ? { RoutingStrategy = "LEAST_OUTSTANDING_REQUESTS" } : null
  } : key => value if value != null }
  # A variant that carries components names no model, so all releases have one configuration.
  production_variants = [for each in local.releases : merge(local.variant_settings, local.component ? {} : { ModelName = each.model })]

  async = var.async == null ? null : {
    ClientConfig = { MaxConcurrentInvocationsPerInstance = var.async.max_concurrent_requests }
    OutputConfig = { for key, value in {
      S3OutputPath  = var.async.output_uri
      S3FailurePath = "${trimsuffix(var.async.output_uri, "/")}/failed"
      KmsKeyId      = var.objects_kms_key_arn
      NotificationConfig = length(local.topics) == 0 ? null : { for key, value in {
        SuccessTopic = var.async.success_topic_arn
        ErrorTopic   = var.async.error_topic_arn
      } : key => value if value != null }
    } : key => value if value != null }
  }

  # An endpoint whose variant has no model has the network's settings itself; the models of its components do not count.
  network = { for key, value in {
    EnableNetworkIsolation = var.network_isolation
    VpcConfig              = length(var.subnet_ids) == 0 ? null : { Subnets = var.subnet_ids, SecurityGroupIds = var.security_group_ids }
  } : key => value if local.component && value != null }

  # Named here: what CloudFormation would call it after its stack is longer than the 63 characters that an endpoint takes.
  configurations = { for variant in local.production_variants :
    "${var.name}-${substr(sha256(local.component ? jsonencode([variant, local.async, var.volume_kms_key_arn, local.network]) : jsonencode([variant, local.async, var.volume_kms_key_arn])), 0, 12)}" => variant...
  }
  configuration_name = "${var.name}-${substr(sha256(local.component ? jsonencode([local.production_variants[0], local.async, var.volume_kms_key_arn, local.network]) : jsonencode([local.production_variants[0], local.async, var.volume_kms_key_arn])), 0, 12)}"
}

# The model's name is known before the model is: depends_on keeps the order. A configuration that is no longer listed goes
# as its model does: after the endpoint's update, if that succeeded.
resource "aws_cloudformation_stack" "configuration" {
  for_each = local.configurations
  name     = each.key
  template_body = jsonencode({
    AWSTemplateFormatVersion = "2010-09-09"
    Description              = "${var.name}: the configuration of a SageMaker endpoint"
    Resources = {
      Configuration = {
        Type = "AWS::SageMaker::EndpointConfig"
        Properties = { for key, value in merge(local.network, {
          EndpointConfigName   = each.key
          ProductionVariants   = [each.value[0]]
          AsyncInferenceConfig = local.async
          ExecutionRoleArn     = local.component ? local.role_arn : null
          KmsKeyId             = local.serverless ? null : var.volume_kms_key_arn
        }) : key => value if value != null }
      }
    }
    Outputs = { Name = { Value = { "Fn::GetAtt" = ["Configuration", "EndpointConfigName"] } } }
  })
  on_failure = "DELETE"
  tags       = var.tags

  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_sagemaker_model.this]
}

# What cannot change while instances scale. Replaced with the instance type, it is destroyed after the scalable target that
# depends on it and made before the endpoint's update: SageMaker refuses another type while a target is registered.
resource "terraform_data" "fleet" {
  triggers_replace = local.serverless ? null : var.instance_type
}

locals {
  # A canary is at most half of the instances, so that one instance has none.
  shifting = var.rollout.type != null ? var.rollout.type : (local.scales && var.capacity.min >= 2 ? "CANARY" : "ALL_AT_ONCE")
  # The longest that a rollout may take: both fleets start, and each step is watched.
  steps           = local.shifting == "LINEAR" || local.shifting == "ROLLING" ? ceil(100 / var.rollout.step_percent) : 2
  rollout_timeout = min(28800, max(600, local.steps * (var.rollout.watch_seconds + (local.shifting == "ROLLING" ? local.start_seconds : 0)) + 2 * var.rollout.keep_old_seconds + local.start_seconds))
  start_seconds   = var.startup_timeout_seconds.health_check + var.startup_timeout_seconds.download
}

resource "aws_sagemaker_endpoint" "this" {
  name                 = var.name
  endpoint_config_name = aws_cloudformation_stack.configuration[local.configuration_name].outputs["Name"]
  tags                 = var.tags

  # The provider replaces an endpoint that gets alarms for its rollouts later, so that modes other than realtime have them
  # only when asked. Copies of a component are updated by the component: the endpoint has no model to shift traffic from.
  dynamic "deployment_config" {
    for_each = contains(["realtime", "multi-model"], var.mode) || var.rollout.type != null ? [var.rollout] : []
    content {
      dynamic "blue_green_update_policy" {
        for_each = local.shifting == "ROLLING" ? [] : [deployment_config.value]
        content {
          termination_wait_in_seconds          = blue_green_update_policy.value.keep_old_seconds
          maximum_execution_timeout_in_seconds = local.rollout_timeout
          traffic_routing_configuration {
            type                     = local.shifting
            wait_interval_in_seconds = blue_green_update_policy.value.watch_seconds
            dynamic "canary_size" {
              for_each = local.shifting == "CANARY" ? [blue_green_update_policy.value.canary_percent] : []
              content {
                type  = "CAPACITY_PERCENT"
                value = canary_size.value
              }
            }
            dynamic "linear_step_size" {
              for_each = local.shifting == "LINEAR" ? [blue_green_update_policy.value.step_percent] : []
              content {
                type  = "CAPACITY_PERCENT"
                value = linear_step_size.value
              }
            }
          }
        }
      }
      dynamic "rolling_update_policy" {
        for_each = local.shifting == "ROLLING" ? [deployment_config.value] : []
        content {
          wait_interval_in_seconds             = rolling_update_policy.value.watch_seconds
          maximum_execution_timeout_in_seconds = local.rollout_timeout
          maximum_batch_size {
            type  = "CAPACITY_PERCENT"
            value = rolling_update_policy.value.step_percent
          }
        }
      }
      auto_rollback_configuration {
        dynamic "alarms" {
          for_each = aws_cloudwatch_metric_alarm.endpoint
          content {
            alarm_name = alarms.value.alarm_name
          }
        }
      }
    }
  }

  lifecycle {
    # SageMaker undoes an update by itself, and the provider takes an endpoint that is in service again for a success.
    # Without this the apply would go on and delete the configuration and the model that serve.
    postcondition {
      condition     = self.endpoint_config_name == aws_cloudformation_stack.configuration[local.configuration_name].outputs["Name"]
      error_message = "SageMaker rolled ${var.name} back: it serves by ${self.endpoint_config_name}, not by ${local.configuration_name}. Nothing was deleted. The reason: aws sagemaker describe-endpoint --endpoint-name ${var.name} --query FailureReason; the log: /aws/sagemaker/Endpoints/${var.name}. Apply the earlier values to go back, or mended ones to try again."
    }
  }
  depends_on = [terraform_data.fleet, aws_s3_object.models]
}

locals {
  alarms = {
    errors  = { metric = "Invocation5XXErrors", statistic = "Sum", extended = null, threshold = var.alarm.errors }
    latency = { metric = "ModelLatency", statistic = null, extended = "p99", threshold = var.alarm.latency_p99_seconds * 1000000 }
  }
}

# They name the endpoint by its text: the endpoint refers to them, to roll back.
resource "aws_cloudwatch_metric_alarm" "endpoint" {
  for_each            = local.alarms
  alarm_name          = "${var.name}-${each.key}"
  alarm_description   = "SageMaker endpoint ${var.name}: ${each.value.metric}"
  namespace           = "AWS/SageMaker"
  metric_name         = each.value.metric
  dimensions          = { EndpointName = var.name, VariantName = local.variant }
  statistic           = each.value.statistic
  extended_statistic  = each.value.extended
  threshold           = each.value.threshold
  comparison_operator = "GreaterThanOrEqualToThreshold"
  period              = 60
  evaluation_periods  = 5
  datapoints_to_alarm = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm.topic_arns
  tags                = var.tags
}
