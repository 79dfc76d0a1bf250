# What each mode makes, with the provider's schema and without an account. Mocks fill in no defaults of the provider.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { name = "eu-west-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/remora" }
  }
  mock_resource "aws_cloudformation_stack" {
    defaults = { outputs = { Name = "configuration" } }
  }
  mock_resource "aws_appautoscaling_policy" {
    defaults = { arn = "arn:aws:autoscaling:eu-west-1:111122223333:scalingPolicy:1:resource/sagemaker:policyName/wake" }
  }
}

variables {
  name      = "remora"
  model_uri = "s3://example-models/repository/"
  image_uri = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/team/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
}

run "a_gpu_endpoint_gets_the_ami_with_cuda_13" {
  command = plan
  assert {
    condition     = local.production_variant.InferenceAmiVersion == "al2023-ami-sagemaker-inference-gpu-4-1"
    error_message = "the wheels of the gpu extra need CUDA 13, and so the AMI with driver 580"
  }
  assert {
    condition     = aws_appautoscaling_policy.concurrency[0].target_tracking_scaling_policy_configuration[0].predefined_metric_specification[0].predefined_metric_type == "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    error_message = "instances follow concurrency"
  }
  assert {
    condition     = length(aws_sagemaker_endpoint.this.deployment_config[0].auto_rollback_configuration[0].alarms) == 2
    error_message = "a rollout is undone by either alarm"
  }
}

run "the_configuration_is_named_within_what_an_endpoint_takes" {
  command = plan
  variables {
    name = "a234567890b234567890c234567890d234567890"
  }
  assert {
    condition     = length(local.configuration_name) <= 63 && aws_cloudformation_stack.configuration.name == local.configuration_name
    error_message = "an endpoint takes 63 characters, and a name that CloudFormation makes up may be longer"
  }
}

run "a_cpu_endpoint_keeps_the_default_ami" {
  command = plan
  variables {
    instance_type = "ml.c7i.large"
  }
  assert {
    condition     = !contains(keys(local.production_variant), "InferenceAmiVersion")
    error_message = "a GPU AMI on an instance without GPU"
  }
}

run "a_prefix_is_read_as_it_lies" {
  command = plan
  assert {
    condition     = aws_sagemaker_model.this.primary_container[0].model_data_source[0].s3_data_source[0].s3_data_type == "S3Prefix"
    error_message = "a prefix is not an archive"
  }
}

run "an_archive_is_unpacked" {
  command = plan
  variables {
    model_uri = "s3://example-models/models.tar.gz"
  }
  assert {
    condition     = aws_sagemaker_model.this.primary_container[0].model_data_source[0].s3_data_source[0].compression_type == "Gzip"
    error_message = "an archive is unpacked by SageMaker"
  }
}

run "async_wakes_from_nothing" {
  command = apply
  variables {
    mode     = "async"
    capacity = { min = 0, max = 3 }
    async    = { output_uri = "s3://example-answers/remora" }
  }
  assert {
    condition     = aws_appautoscaling_target.variant[0].min_capacity == 0 && aws_cloudwatch_metric_alarm.wake[0].metric_name == "HasBacklogWithoutCapacity"
    error_message = "from no instance the first must come by an alarm"
  }
  assert {
    condition     = length(aws_sagemaker_endpoint.this.deployment_config) == 0
    error_message = "asynchronous endpoints know no traffic shifting"
  }
}

run "serverless_has_no_instances" {
  command = plan
  variables {
    mode = "serverless"
  }
  assert {
    condition     = !contains(keys(local.production_variant), "InstanceType") && length(aws_appautoscaling_target.variant) == 0
    error_message = "serverless scales by itself"
  }
}

run "scale_to_zero_is_a_component_of_a_stack" {
  command = apply
  variables {
    mode     = "scale-to-zero"
    capacity = { min = 0, max = 2 }
  }
  assert {
    condition     = length(aws_cloudformation_stack.component) == 1 && length(aws_appautoscaling_target.variant) == 0
    error_message = "the copies of the component scale, and the instances after them"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.component[0].template_body).Resources.Target.Properties.MinCapacity == 0
    error_message = "the component's copies may go down to none"
  }
  assert {
    condition     = !contains(keys(jsondecode(aws_cloudformation_stack.configuration.template_body).Resources.Configuration.Properties.ProductionVariants[0]), "ModelName")
    error_message = "a variant that carries components names no model"
  }
  assert {
    condition     = output.inference_component_name == "remora"
    error_message = "an invocation has to name the component"
  }
}

run "the_role_reads_its_models_and_no_others" {
  command = apply
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint.policy).Statement : s.Resource if s.Sid == "ReadModels"]) == ["arn:aws:s3:::example-models/repository/*"]
    error_message = "the role may read too much or too little of S3"
  }
  assert {
    condition     = alltrue([for s in jsondecode(aws_iam_role_policy.endpoint.policy).Statement : !contains(s.Action, "*") && !anytrue([for a in s.Action : endswith(a, ":*")])])
    error_message = "an action is not named"
  }
  assert {
    condition     = toset([for s in jsondecode(aws_iam_role_policy.endpoint.policy).Statement : s.Sid if contains(s.Resource, "*")]) == toset(["PullToken", "WriteMetrics"])
    error_message = "only what has no resource may be allowed on all"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint.policy).Statement : s.Resource if s.Sid == "PullImage"]) == ["arn:aws:ecr:eu-west-1:*:repository/team/remora"]
    error_message = "the role pulls the image that is named"
  }
  assert {
    condition     = jsondecode(aws_iam_role.endpoint.assume_role_policy).Statement[0].Condition.StringEquals["aws:SourceAccount"] == "111122223333"
    error_message = "SageMaker may take the role for this account alone"
  }
}
