# What the endpoint may do: read its models, pull its image, write its logs and metrics. Nothing else of the account.

locals {
  arn = "arn:${data.aws_partition.current.partition}"
  statements = concat(
    [
      {
        Sid      = "ReadModels"
        Effect   = "Allow"
        Action   = ["s3:GetObject"]
        Resource = ["${local.arn}:s3:::${local.model_bucket}/${local.model_key}${local.archive ? "" : "*"}"]
      },
      {
        Sid       = "ListModels"
        Effect    = "Allow"
        Action    = ["s3:ListBucket"]
        Resource  = ["${local.arn}:s3:::${local.model_bucket}"]
        Condition = { StringLike = { "s3:prefix" = ["${local.model_key}*"] } }
      },
      {
        Sid      = "PullImage"
        Effect   = "Allow"
        Action   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
        Resource = ["${local.arn}:ecr:${data.aws_region.current.name}:*:repository/${local.repository}"]
      },
      {
        # Has no resource to narrow it down to.
        Sid      = "PullToken"
        Effect   = "Allow"
        Action   = ["ecr:GetAuthorizationToken"]
        Resource = ["*"]
      },
      {
        Sid      = "WriteLogs"
        Effect   = "Allow"
        Action   = ["logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"]
        Resource = ["${local.arn}:logs:${data.aws_region.current.name}:${data.aws_caller_identity.current.account_id}:log-group:/aws/sagemaker/*"]
      },
      {
        Sid       = "WriteMetrics"
        Effect    = "Allow"
        Action    = ["cloudwatch:PutMetricData"]
        Resource  = ["*"]
        Condition = { StringLike = { "cloudwatch:namespace" = ["AWS/SageMaker", "/aws/sagemaker/*"] } }
      },
    ],
    var.async == null ? [] : [
      {
        Sid      = "AnswerAndRead"
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:PutObject"]
        Resource = ["${local.arn}:s3:::${trimsuffix(trimprefix(var.async.output_uri, "s3://"), "/")}/*"]
      },
    ],
    length(local.topics) == 0 ? [] : [
      { Sid = "Tell", Effect = "Allow", Action = ["sns:Publish"], Resource = local.topics },
    ],
    var.kms_key_arn == null ? [] : [
      { Sid = "UseKey", Effect = "Allow", Action = ["kms:Decrypt", "kms:GenerateDataKey"], Resource = [var.kms_key_arn] },
    ],
    length(var.subnet_ids) == 0 ? [] : [
      {
        # As SageMaker's guide asks for endpoints in a VPC; interfaces that are not made yet have no ARN.
        Sid    = "AttachToSubnets"
        Effect = "Allow"
        Action = [
          "ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface",
          "ec2:DeleteNetworkInterfacePermission", "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces",
          "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs",
        ]
        Resource = ["*"]
      },
    ],
  )
  repository = split("@", join("/", slice(split("/", var.image_uri), 1, length(split("/", var.image_uri)))))[0]
  topics     = var.async == null ? [] : compact([var.async.success_topic_arn, var.async.error_topic_arn])
}

resource "aws_iam_role" "endpoint" {
  name_prefix = "${substr(var.name, 0, 30)}-"
  tags        = var.tags
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "sagemaker.amazonaws.com" }
      Condition = { StringEquals = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "endpoint" {
  name   = "endpoint"
  role   = aws_iam_role.endpoint.id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.statements })
}
