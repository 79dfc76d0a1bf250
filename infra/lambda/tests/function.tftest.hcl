# The function, its rights, and what keeps it warm.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/remora" }
  }
  mock_resource "aws_cloudwatch_log_group" {
    defaults = { arn = "arn:aws:logs:eu-west-1:111122223333:log-group:/aws/lambda/remora" }
  }
}

variables {
  name      = "remora"
  image_uri = "registry.example/remora@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  model_uri = "s3://example-models/small/"
}

run "it_reads_its_models_and_writes_its_log" {
  command = apply
  assert {
    condition     = toset(flatten([for s in jsondecode(aws_iam_role_policy.this[0].policy).Statement : s.Action])) == toset(["logs:CreateLogStream", "logs:PutLogEvents", "s3:GetObject", "s3:ListBucket"])
    error_message = "a right too many or too few"
  }
  assert {
    condition     = aws_lambda_function.this.environment[0].variables.REMORA_MODEL_REPOSITORY == "s3://example-models/small/"
    error_message = "the function gets the place of its models"
  }
  assert {
    condition     = aws_lambda_function.this.environment[0].variables.OMP_NUM_THREADS == "2"
    error_message = "3538 MB come with two processors"
  }
  assert {
    condition     = aws_lambda_function_url.this[0].authorization_type == "AWS_IAM"
    error_message = "an address without a lock"
  }
}

run "models_in_the_image_need_no_rights" {
  command = apply
  variables {
    model_uri = null
  }
  assert {
    condition     = toset(flatten([for s in jsondecode(aws_iam_role_policy.this[0].policy).Statement : s.Action])) == toset(["logs:CreateLogStream", "logs:PutLogEvents"])
    error_message = "nothing is read from S3"
  }
}

run "kept_warm_takes_a_version_and_an_alias" {
  command = apply
  variables {
    kept_warm = 2
  }
  assert {
    condition     = aws_lambda_function.this.publish && aws_lambda_provisioned_concurrency_config.live[0].provisioned_concurrent_executions == 2 && aws_lambda_function_url.this[0].qualifier == "live"
    error_message = "provisioned concurrency belongs to a version, and the address to its alias"
  }
}

run "lambda_takes_the_role_for_this_account_alone" {
  command = apply
  variables {
    permissions_boundary_arn = "arn:aws:iam::111122223333:policy/boundary"
  }
  assert {
    condition     = jsondecode(aws_iam_role.this[0].assume_role_policy).Statement[0].Condition.StringEquals["aws:SourceAccount"] == "111122223333"
    error_message = "another account could have Lambda use the role"
  }
  assert {
    condition     = aws_iam_role.this[0].permissions_boundary == "arn:aws:iam::111122223333:policy/boundary"
    error_message = "organisations refuse a role without its boundary"
  }
}

run "sampled_events_may_be_written" {
  command = apply
  variables {
    tracing = true
  }
  assert {
    condition     = contains(flatten([for s in jsondecode(aws_iam_role_policy.this[0].policy).Statement : s.Action]), "xray:PutTraceSegments") && aws_lambda_function.this.tracing_config[0].mode == "Active"
    error_message = "traces need the right to be written"
  }
}

run "a_role_that_is_there_is_taken" {
  command = plan
  variables {
    role_arn = "arn:aws:iam::111122223333:role/organisation"
  }
  assert {
    condition     = length(aws_iam_role.this) == 0 && aws_lambda_function.this.role == "arn:aws:iam::111122223333:role/organisation"
    error_message = "no role beside the one that is named"
  }
}

run "it_runs_in_the_private_network_with_its_key" {
  command = apply
  variables {
    subnet_ids         = ["subnet-1", "subnet-2"]
    security_group_ids = ["sg-1"]
    kms_key_arn        = "arn:aws:kms:eu-west-1:111122223333:key/models"
  }
  assert {
    condition     = toset(aws_lambda_function.this.vpc_config[0].subnet_ids) == toset(["subnet-1", "subnet-2"]) && aws_lambda_function.this.kms_key_arn == "arn:aws:kms:eu-west-1:111122223333:key/models"
    error_message = "the function is where it was put"
  }
  assert {
    condition     = toset([for s in jsondecode(aws_iam_role_policy.this[0].policy).Statement : s.Sid if contains(["AttachToSubnets", "UseKey"], s.Sid)]) == toset(["AttachToSubnets", "UseKey"])
    error_message = "a function in a network attaches interfaces, and opens encrypted models"
  }
}
