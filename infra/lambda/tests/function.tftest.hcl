# The function, its rights, and what keeps it warm.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
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
    condition     = toset(flatten([for s in jsondecode(aws_iam_role_policy.this.policy).Statement : s.Action])) == toset(["logs:CreateLogStream", "logs:PutLogEvents", "s3:GetObject", "s3:ListBucket"])
    error_message = "a right too many or too few"
  }
  assert {
    condition     = aws_lambda_function.this.environment[0].variables.REMORA_MODEL_REPOSITORY == "s3://example-models/small/"
    error_message = "the function is told where its models are"
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
    condition     = toset(flatten([for s in jsondecode(aws_iam_role_policy.this.policy).Statement : s.Action])) == toset(["logs:CreateLogStream", "logs:PutLogEvents"])
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
