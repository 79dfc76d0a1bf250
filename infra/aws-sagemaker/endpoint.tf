# The endpoint's configuration comes from CloudFormation, for two values that provider 5.100 refuses: the AMI with CUDA 13,
# and a variant without a model, which is what carries an inference component. tests/infra holds the properties against
# the service's own model.

locals {
  serverless = var.mode == "serverless"
  # What has no value for a mode is null, and left out.
  production_variant = { for key, value in {
    VariantName          = local.variant
    ModelName            = local.component ? null : local.model_name
    InitialVariantWeight = local.component ? null : 1
    ServerlessConfig     = local.serverless ? { MemorySizeInMB = var.serverless.memory_mb, MaxConcurrency = var.serverless.max_concurrency } : null

    InstanceType                                = local.serverless ? null : var.instance_type
    InitialInstanceCount                        = local.serverless ? null : max(var.capacity.min, 1)
    InferenceAmiVersion                         = local.serverless ? null : local.ami
    ContainerStartupHealthCheckTimeoutInSeconds = local.serverless ? null : var.startup_timeout_seconds.health_check
    ModelDataDownloadTimeoutInSeconds           = local.serverless ? null : var.startup_timeout_seconds.download

    ManagedInstanceScaling = local.component ? { Status = "ENABLED", MinInstanceCount = var.capacity.min, MaxInstanceCount = var.capacity.max } : null
    # Batches form where requests wait together, and the instance with the fewest under way is the soonest free.
    RoutingConfig = contains(["realtime", "scale-to-zero"], var.mode) ? { RoutingStrategy = "LEAST_OUTSTANDING_REQUESTS" } : null
  } : key => value if value != null }

  async = var.async == null ? null : {
    ClientConfig = { MaxConcurrentInvocationsPerInstance = var.async.max_concurrent_requests }
    OutputConfig = { for key, value in {
      S3OutputPath  = var.async.output_uri
      S3FailurePath = "${trimsuffix(var.async.output_uri, "/")}/failed"
      KmsKeyId      = var.kms_key_arn
      NotificationConfig = length(local.topics) == 0 ? null : { for key, value in {
        SuccessTopic = var.async.success_topic_arn
        ErrorTopic   = var.async.error_topic_arn
      } : key => value if value != null }
    } : key => value if value != null }
  }

  # Named here: what CloudFormation would call it after its stack is longer than the 63 characters that an endpoint takes.
  configuration_name = "${var.name}-${substr(sha256(jsonencode([local.production_variant, local.async, var.kms_key_arn])), 0, 12)}"
  configuration = {
    AWSTemplateFormatVersion = "2010-09-09"
    Description              = "${var.name}: the configuration of a SageMaker endpoint"
    Resources = {
      Configuration = {
        Type = "AWS::SageMaker::EndpointConfig"
        Properties = { for key, value in {
          EndpointConfigName   = local.configuration_name
          ProductionVariants   = [local.production_variant]
          AsyncInferenceConfig = local.async
          ExecutionRoleArn     = local.component ? aws_iam_role.endpoint.arn : null
          KmsKeyId             = local.serverless ? null : var.kms_key_arn
        } : key => value if value != null }
      }
    }
    Outputs = { Name = { Value = { "Fn::GetAtt" = ["Configuration", "EndpointConfigName"] } } }
  }
}

# The model's name is known before the model is: depends_on keeps the order.
resource "aws_cloudformation_stack" "configuration" {
  # Replaced, never changed: the endpoint moves to the new configuration before the old one goes.
  name          = local.configuration_name
  template_body = jsonencode(local.configuration)
  on_failure    = "DELETE"
  tags          = var.tags

  lifecycle {
    create_before_destroy = true
  }
  depends_on = [aws_sagemaker_model.this]
}

resource "aws_sagemaker_endpoint" "this" {
  name                 = var.name
  endpoint_config_name = aws_cloudformation_stack.configuration.outputs["Name"]
  tags                 = var.tags

  # The other modes know no traffic shifting: they are updated all at once.
  dynamic "deployment_config" {
    for_each = var.mode == "realtime" ? [var.rollout] : []
    content {
      blue_green_update_policy {
        termination_wait_in_seconds          = deployment_config.value.keep_old_seconds
        maximum_execution_timeout_in_seconds = max(600, 2 * (deployment_config.value.watch_seconds + deployment_config.value.keep_old_seconds) + var.startup_timeout_seconds.health_check + var.startup_timeout_seconds.download)
        traffic_routing_configuration {
          type                     = "CANARY"
          wait_interval_in_seconds = deployment_config.value.watch_seconds
          canary_size {
            type  = "CAPACITY_PERCENT"
            value = deployment_config.value.canary_percent
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
