# What each mode makes, with the provider's schema and without an account. Mocks fill in no defaults of the provider.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { id = "eu-west-1" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/remora" }
  }
  mock_resource "aws_cloudformation_stack" {
    defaults = { outputs = { Name = "configuration" } }
  }
  mock_resource "aws_sagemaker_endpoint" {
    defaults = { endpoint_config_name = "configuration" }
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
  variables {
    instance_type = "ml.g5.xlarge"
    gpu_image     = true
  }
  assert {
    condition     = local.production_variants[0].InferenceAmiVersion == "al2023-ami-sagemaker-inference-gpu-4-1"
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
    condition     = length(local.configuration_name) <= 63 && aws_cloudformation_stack.configuration[local.configuration_name].name == local.configuration_name
    error_message = "an endpoint takes 63 characters, and a name that CloudFormation makes up may be longer"
  }
}

run "a_cpu_endpoint_keeps_the_default_ami" {
  command = plan
  assert {
    condition     = !contains(keys(local.production_variants[0]), "InferenceAmiVersion")
    error_message = "a GPU AMI on an instance without GPU"
  }
}

run "a_prefix_is_read_as_it_lies" {
  command = plan
  assert {
    condition     = aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_source[0].s3_data_source[0].s3_data_type == "S3Prefix"
    error_message = "a prefix is not an archive"
  }
}

run "an_archive_is_unpacked" {
  command = plan
  variables {
    model_uri = "s3://example-models/models.tar.gz"
  }
  assert {
    condition     = aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_url == "s3://example-models/models.tar.gz" && length(aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_source) == 0
    error_message = "batch transform takes no model_data_source"
  }
}

run "a_gpu_that_is_not_used_is_not_ready" {
  command = plan
  variables {
    instance_type = "ml.g5.xlarge"
    gpu_image     = true
    environment   = { A = "1" }
  }
  assert {
    condition     = aws_sagemaker_model.this[local.model_name].primary_container[0].environment == tomap({ A = "1", REMORA_REQUIRE_GPU = "true" })
    error_message = "the processors would serve instead"
  }
}

run "async_wakes_from_nothing" {
  command = apply
  variables {
    mode     = "async"
    capacity = { min = 0, max = 3 }
    async    = { input_uri = "s3://example-requests/in/", output_uri = "s3://example-answers/remora", target_backlog = 3 }
  }
  assert {
    condition     = aws_appautoscaling_target.variant[0].min_capacity == 0 && aws_cloudwatch_metric_alarm.wake[0].metric_name == "HasBacklogWithoutCapacity"
    error_message = "from no instance the first must come by an alarm"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Resource if s.Sid == "ReadRequests"]) == ["arn:aws:s3:::example-requests/in/*"]
    error_message = "the role must read the requests"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s if s.Sid == "ListRequestsAndAnswers"]).Condition.StringLike["s3:prefix"] == ["in/*", "remora/*"]
    error_message = "the role must list requests and answers"
  }
  assert {
    condition     = contains(one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Action if s.Sid == "WriteAnswers"]), "s3:AbortMultipartUpload")
    error_message = "large answers are written in parts, which must be given up when one fails"
  }
  assert {
    condition     = strcontains(output.invoke, "s3://example-requests/in/request.json")
    error_message = "the printed command must name a place that the role may read"
  }
  assert {
    condition     = aws_appautoscaling_policy.backlog[0].target_tracking_scaling_policy_configuration[0].target_value == 3
    error_message = "a backlog is not a concurrency"
  }
  assert {
    condition     = length(aws_sagemaker_endpoint.this.deployment_config) == 0
    error_message = "an endpoint that gets alarms for its rollouts later is replaced"
  }
}

run "an_asynchronous_rollout_is_guarded_when_asked" {
  command = plan
  variables {
    mode    = "async"
    async   = { input_uri = "s3://example-requests/in", output_uri = "s3://example-answers/remora" }
    rollout = { type = "ROLLING", step_percent = 25 }
  }
  assert {
    condition     = aws_sagemaker_endpoint.this.deployment_config[0].rolling_update_policy[0].maximum_batch_size[0].value == 25 && length(aws_sagemaker_endpoint.this.deployment_config[0].auto_rollback_configuration[0].alarms) == 2
    error_message = "a rolling update with its alarms"
  }
}

run "one_instance_has_no_half_for_a_canary" {
  command = plan
  assert {
    condition     = aws_sagemaker_endpoint.this.deployment_config[0].blue_green_update_policy[0].traffic_routing_configuration[0].type == "ALL_AT_ONCE"
    error_message = "a canary takes at most half of the instances"
  }
}

run "two_instances_have_a_canary" {
  command = plan
  variables {
    capacity = { min = 2, max = 6, initial = 5 }
  }
  assert {
    condition     = aws_sagemaker_endpoint.this.deployment_config[0].blue_green_update_policy[0].traffic_routing_configuration[0].canary_size[0].value == 20
    error_message = "a fifth of the capacity goes first"
  }
  assert {
    condition     = local.production_variants[0].InitialInstanceCount == 5
    error_message = "a rollout under load starts with as many instances as run now"
  }
}

run "traffic_moves_in_steps" {
  command = plan
  variables {
    capacity = { min = 4, max = 6 }
    rollout  = { type = "LINEAR", step_percent = 25 }
  }
  assert {
    condition     = aws_sagemaker_endpoint.this.deployment_config[0].blue_green_update_policy[0].traffic_routing_configuration[0].linear_step_size[0].value == 25
    error_message = "a quarter at a time"
  }
}

run "keys_of_volumes_and_of_objects_are_apart" {
  command = apply
  variables {
    instance_type       = "ml.g5.xlarge"
    gpu_image           = true
    objects_kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/objects"
  }
  assert {
    condition     = !contains(keys(jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties), "KmsKeyId")
    error_message = "SageMaker refuses a key for the volume of an instance with NVMe disks"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Resource if s.Sid == "UseKey"]) == ["arn:aws:kms:eu-west-1:111122223333:key/objects"]
    error_message = "the role must open encrypted models"
  }
}

run "the_volume_has_a_key_where_it_may" {
  command = apply
  variables {
    volume_kms_key_arn = "arn:aws:kms:eu-west-1:111122223333:key/volume"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties.KmsKeyId == "arn:aws:kms:eu-west-1:111122223333:key/volume"
    error_message = "the key of the volume belongs to the configuration"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Action if s.Sid == "GrantVolumeKey"]) == ["kms:CreateGrant"]
    error_message = "SageMaker attaches the volume under a grant of the role"
  }
}

run "a_role_that_is_there_is_taken" {
  command = plan
  variables {
    role_arn = "arn:aws:iam::111122223333:role/organisation"
  }
  assert {
    condition     = length(aws_iam_role.endpoint) == 0 && length(aws_iam_role_policy.endpoint) == 0 && aws_sagemaker_model.this[local.model_name].execution_role_arn == "arn:aws:iam::111122223333:role/organisation"
    error_message = "no role beside the one that is named"
  }
}

run "a_role_made_here_keeps_within_the_boundary" {
  command = plan
  variables {
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
  }
  assert {
    condition     = aws_iam_role.endpoint[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "organisations refuse a role without its boundary"
  }
}

run "serverless_has_no_instances" {
  command = plan
  variables {
    mode      = "serverless"
    model_uri = "s3://example-models/models.tar.gz"
  }
  assert {
    condition     = length(aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_source) == 0 && !aws_sagemaker_model.this[local.model_name].enable_network_isolation
    error_message = "a serverless endpoint takes an archive by its URL, and no isolation"
  }
  assert {
    condition     = !contains(keys(local.production_variants[0]), "InstanceType") && length(aws_appautoscaling_target.variant) == 0
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
    condition     = jsondecode(aws_cloudformation_stack.component["main"].template_body).Resources.Target.Properties.MinCapacity == 0
    error_message = "the component's copies may go down to none"
  }
  assert {
    condition     = !contains(keys(jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties.ProductionVariants[0]), "ModelName")
    error_message = "a variant that carries components names no model"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.component["main"].template_body).Resources.Component.Properties.Specification.DataCacheConfig.EnableCaching
    error_message = "instances keep the model and the image for the next copy"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties.EnableNetworkIsolation && !contains(keys(jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties), "VpcConfig")
    error_message = "an endpoint without a model in its variant isolates its containers itself"
  }
  assert {
    condition     = output.inference_component_name == "remora"
    error_message = "an invocation has to name the component"
  }
}

run "an_endpoint_of_components_is_in_the_private_network_itself" {
  command = apply
  variables {
    mode               = "scale-to-zero"
    capacity           = { min = 0, max = 2 }
    subnet_ids         = ["subnet-1"]
    security_group_ids = ["sg-1"]
    component          = { memory_mb = 4096, data_cache = false }
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.configuration[local.configuration_name].template_body).Resources.Configuration.Properties.VpcConfig == { Subnets = ["subnet-1"], SecurityGroupIds = ["sg-1"] }
    error_message = "the instances of components are outside of the private network"
  }
  assert {
    condition     = !jsondecode(aws_cloudformation_stack.component["main"].template_body).Resources.Component.Properties.Specification.DataCacheConfig.EnableCaching
    error_message = "the cache can be switched off"
  }
}

run "several_models_share_the_instances" {
  command = apply
  variables {
    mode          = "scale-to-zero"
    instance_type = "ml.g6.12xlarge"
    gpu_image     = true
    capacity      = { min = 0, max = 2 }
    components = {
      small = { model_uri = "s3://example-models/small/", copies = { min = 0, max = 4 }, target_concurrency = 20 }
      large = { model_uri = "s3://other-models/large.tar.gz", accelerators = 2, memory_mb = 16384, environment = { REMORA_LOG_LEVEL = "warn" } }
    }
  }
  assert {
    condition     = { for key, stack in aws_cloudformation_stack.component : key => jsondecode(stack.template_body).Resources.Component.Properties.Specification.ComputeResourceRequirements.NumberOfAcceleratorDevicesRequired } == { main = 1, small = 1, large = 2 }
    error_message = "each component takes its own share of an instance"
  }
  assert {
    condition     = length(distinct([for stack in aws_cloudformation_stack.component : jsondecode(stack.template_body).Resources.Component.Properties.Specification.ModelName])) == 3
    error_message = "each component has a separate model"
  }
  assert {
    condition     = aws_sagemaker_model.this[jsondecode(aws_cloudformation_stack.component["large"].template_body).Resources.Component.Properties.Specification.ModelName].primary_container[0].environment == tomap({ REMORA_LOG_LEVEL = "warn", REMORA_REQUIRE_GPU = "true" })
    error_message = "a component has the model that it names"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.component["small"].template_body).Resources.Target.Properties.MaxCapacity == 4 && jsondecode(aws_cloudformation_stack.component["small"].template_body).Resources.Follow.Properties.TargetTrackingScalingPolicyConfiguration.TargetValue == 20
    error_message = "each component scales by itself"
  }
  assert {
    condition     = output.inference_component_names == tomap({ main = "remora", small = "remora-small", large = "remora-large" })
    error_message = "an invocation has to name the component"
  }
  assert {
    condition     = toset(one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Resource if s.Sid == "ReadModels"])) == toset(["arn:aws:s3:::example-models/repository/*", "arn:aws:s3:::example-models/small/*", "arn:aws:s3:::other-models/large.tar.gz"])
    error_message = "the role reads the models of all components"
  }
  assert {
    condition     = length(aws_cloudformation_stack.configuration) == 1
    error_message = "a variant that carries components names no model"
  }
}

run "archives_are_loaded_by_name" {
  command = plan
  variables {
    mode     = "multi-model"
    capacity = { min = 2, max = 4 }
  }
  assert {
    condition     = aws_sagemaker_model.this[local.model_name].primary_container[0].mode == "MultiModel" && aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_url == "s3://example-models/repository/"
    error_message = "the prefix of the archives is the model"
  }
  assert {
    condition     = length(aws_sagemaker_model.this[local.model_name].primary_container[0].model_data_source) == 0
    error_message = "SageMaker takes one way to name models"
  }
  assert {
    condition     = length(aws_appautoscaling_policy.concurrency) == 1 && length(aws_sagemaker_endpoint.this.deployment_config) == 1
    error_message = "it scales and rolls back as a real-time endpoint does"
  }
  assert {
    condition     = strcontains(output.invoke, "--target-model MODEL.tar.gz")
    error_message = "a request names its archive"
  }
}

run "capacity_follows_the_clock" {
  command = plan
  variables {
    schedule = {
      morning = { at = "cron(0 7 ? * MON-FRI *)", min = 4, max = 8, timezone = "Europe/Berlin" }
      evening = { at = "cron(0 19 ? * MON-FRI *)", min = 1, max = 4 }
    }
  }
  assert {
    condition     = aws_appautoscaling_scheduled_action.capacity["morning"].scalable_target_action[0].min_capacity == "4" && aws_appautoscaling_scheduled_action.capacity["morning"].timezone == "Europe/Berlin"
    error_message = "there are instances before the requests come"
  }
  assert {
    condition     = aws_appautoscaling_scheduled_action.capacity["evening"].timezone == "Etc/UTC"
    error_message = "times are UTC where no zone is given"
  }
}

run "the_role_reads_its_models_and_no_others" {
  command = apply
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Resource if s.Sid == "ReadModels"]) == ["arn:aws:s3:::example-models/repository/*"]
    error_message = "the role may read too much or too little of S3"
  }
  assert {
    condition     = alltrue([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : !contains(s.Action, "*") && !anytrue([for a in s.Action : endswith(a, ":*")])])
    error_message = "an action is not named"
  }
  assert {
    condition     = toset([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Sid if contains(s.Resource, "*")]) == toset(["PullToken", "WriteMetrics"])
    error_message = "only what has no resource may be allowed on all"
  }
  assert {
    condition     = one([for s in jsondecode(aws_iam_role_policy.endpoint[0].policy).Statement : s.Resource if s.Sid == "PullImage"]) == ["arn:aws:ecr:eu-west-1:*:repository/team/remora"]
    error_message = "the role pulls the image that is named"
  }
  assert {
    condition     = jsondecode(aws_iam_role.endpoint[0].assume_role_policy).Statement[0].Condition.StringEquals["aws:SourceAccount"] == "111122223333"
    error_message = "SageMaker may take the role for this account alone"
  }
}
