# Real-time with no instances at night takes an inference component, for which the provider has no resource: CloudFormation
# makes it, and scales its copies. The instances follow the copies.

locals {
  # The model of the module, and those that share its instances. Each is invoked and scaled by itself.
  components = merge(
    { main = {
      name         = var.name
      model        = local.model_name
      memory_mb    = var.component.memory_mb
      accelerators = local.accelerators
      data_cache   = var.component.data_cache
      copies       = { min = var.capacity.min, max = var.capacity.max }
      target       = var.target_concurrency
    } },
    { for at, key in sort(keys(var.components)) : key => {
      name         = "${var.name}-${key}"
      model        = local.containers[length(local.releases) + at].model
      memory_mb    = var.components[key].memory_mb
      accelerators = var.components[key].accelerators != null ? var.components[key].accelerators : (local.gpu ? 1 : 0)
      data_cache   = var.component.data_cache
      copies       = var.components[key].copies
      target       = coalesce(var.components[key].target_concurrency, var.target_concurrency)
    } },
  )
  templates = { for key, each in local.components : key => {
    AWSTemplateFormatVersion = "2010-09-09"
    Description              = "${each.name}: a model of a SageMaker endpoint, as an inference component whose copies come and go"
    Resources = {
      Component = {
        Type = "AWS::SageMaker::InferenceComponent"
        Properties = {
          InferenceComponentName = each.name
          EndpointName           = aws_sagemaker_endpoint.this.name
          VariantName            = local.variant
          RuntimeConfig          = { CopyCount = max(each.copies.min, 1) }
          Specification = {
            ModelName = aws_sagemaker_model.this[each.model].name
            StartupParameters = {
              ContainerStartupHealthCheckTimeoutInSeconds = var.startup_timeout_seconds.health_check
              ModelDataDownloadTimeoutInSeconds           = var.startup_timeout_seconds.download
            }
            # Models and image stay on each instance, so that a copy starts without reading them again.
            DataCacheConfig = { EnableCaching = each.data_cache }
            ComputeResourceRequirements = { for key, value in {
              MinMemoryRequiredInMb              = each.memory_mb
              NumberOfCpuCoresRequired           = each.accelerators == 0 ? 1 : null
              NumberOfAcceleratorDevicesRequired = each.accelerators == 0 ? null : each.accelerators
            } : key => value if value != null }
          }
        }
      }
      Target = {
        Type      = "AWS::ApplicationAutoScaling::ScalableTarget"
        DependsOn = "Component"
        Properties = {
          ServiceNamespace  = "sagemaker"
          ScalableDimension = "sagemaker:inference-component:DesiredCopyCount"
          ResourceId        = "inference-component/${each.name}"
          MinCapacity       = each.copies.min
          MaxCapacity       = each.copies.max
        }
      }
      Follow = {
        Type = "AWS::ApplicationAutoScaling::ScalingPolicy"
        Properties = {
          PolicyName      = "${each.name}-concurrency"
          PolicyType      = "TargetTrackingScaling"
          ScalingTargetId = { Ref = "Target" }
          TargetTrackingScalingPolicyConfiguration = {
            TargetValue                   = each.target
            ScaleInCooldown               = var.cooldown_seconds.in
            ScaleOutCooldown              = var.cooldown_seconds.out
            PredefinedMetricSpecification = { PredefinedMetricType = "SageMakerInferenceComponentConcurrentRequestsPerCopyHighResolution" }
          }
        }
      }
      # Following needs a copy to follow: from none, the first comes when requests find no capacity.
      Wake = {
        Type = "AWS::ApplicationAutoScaling::ScalingPolicy"
        Properties = {
          PolicyName      = "${each.name}-wake"
          PolicyType      = "StepScaling"
          ScalingTargetId = { Ref = "Target" }
          StepScalingPolicyConfiguration = {
            AdjustmentType        = "ChangeInCapacity"
            MetricAggregationType = "Maximum"
            Cooldown              = var.cooldown_seconds.out
            StepAdjustments       = [{ MetricIntervalLowerBound = 0, ScalingAdjustment = 1 }]
          }
        }
      }
      WakeAlarm = {
        Type = "AWS::CloudWatch::Alarm"
        Properties = {
          AlarmName          = "${each.name}-wake"
          AlarmDescription   = "Requests to ${each.name} found no capacity."
          Namespace          = "AWS/SageMaker"
          MetricName         = "NoCapacityInvocationFailures"
          Dimensions         = [{ Name = "InferenceComponentName", Value = each.name }]
          Statistic          = "Maximum"
          Period             = 60
          EvaluationPeriods  = 1
          ComparisonOperator = "GreaterThanOrEqualToThreshold"
          Threshold          = 1
          TreatMissingData   = "missing"
          AlarmActions       = [{ Ref = "Wake" }]
        }
      }
    }
  } }
}

resource "aws_cloudformation_stack" "component" {
  for_each      = local.component ? local.components : {}
  name          = "${each.value.name}-component"
  template_body = jsonencode(local.templates[each.key])
  on_failure    = "DELETE"
  tags          = var.tags
}

# Releases before there were several components.
moved {
  from = aws_cloudformation_stack.component[0]
  to   = aws_cloudformation_stack.component["main"]
}
