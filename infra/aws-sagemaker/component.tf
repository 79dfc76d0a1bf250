# Real-time with no instances at night takes an inference component, for which the provider has no resource: CloudFormation
# makes it, and scales its copies. The instances follow the copies.

locals {
  template = {
    AWSTemplateFormatVersion = "2010-09-09"
    Description              = "${var.name}: the model of a SageMaker endpoint, as an inference component whose copies come and go"
    Resources = {
      Component = {
        Type = "AWS::SageMaker::InferenceComponent"
        Properties = {
          InferenceComponentName = var.name
          EndpointName           = aws_sagemaker_endpoint.this.name
          VariantName            = local.variant
          RuntimeConfig          = { CopyCount = max(var.capacity.min, 1) }
          Specification = {
            ModelName = aws_sagemaker_model.this[local.model_name].name
            StartupParameters = {
              ContainerStartupHealthCheckTimeoutInSeconds = var.startup_timeout_seconds.health_check
              ModelDataDownloadTimeoutInSeconds           = var.startup_timeout_seconds.download
            }
            # Models and image stay on each instance, so that a copy starts without reading them again.
            DataCacheConfig = { EnableCaching = var.component.data_cache }
            ComputeResourceRequirements = { for key, value in {
              MinMemoryRequiredInMb              = var.component.memory_mb
              NumberOfCpuCoresRequired           = local.accelerators == 0 ? 1 : null
              NumberOfAcceleratorDevicesRequired = local.accelerators == 0 ? null : local.accelerators
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
          ResourceId        = "inference-component/${var.name}"
          MinCapacity       = var.capacity.min
          MaxCapacity       = var.capacity.max
        }
      }
      Follow = {
        Type = "AWS::ApplicationAutoScaling::ScalingPolicy"
        Properties = {
          PolicyName      = "${var.name}-concurrency"
          PolicyType      = "TargetTrackingScaling"
          ScalingTargetId = { Ref = "Target" }
          TargetTrackingScalingPolicyConfiguration = {
            TargetValue                   = var.target_concurrency
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
          PolicyName      = "${var.name}-wake"
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
          AlarmName          = "${var.name}-wake"
          AlarmDescription   = "Requests to ${var.name} found no capacity."
          Namespace          = "AWS/SageMaker"
          MetricName         = "NoCapacityInvocationFailures"
          Dimensions         = [{ Name = "InferenceComponentName", Value = var.name }]
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
  }
}

resource "aws_cloudformation_stack" "component" {
  count         = local.component ? 1 : 0
  name          = "${var.name}-component"
  template_body = jsonencode(local.template)
  on_failure    = "DELETE"
  tags          = var.tags
}
