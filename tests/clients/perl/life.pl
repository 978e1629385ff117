# The whole life of a job, with Apache Thrift's own library for Perl (Debian: libthrift-perl), which
# has the binary protocol only.
#
#     thrift --gen perl -out gen thrift/pinlater.thrift
#     perl -I gen life.pl 9010 mail framed binary

use strict;
use warnings;

use Thrift::BinaryProtocol;
use Thrift::BufferedTransport;
use Thrift::FramedTransport;
use Thrift::Socket;

use Constants;
use PinLater;
use Types;

my %STATES = map { PinLaterJobState->can($_)->() => $_ } qw(PENDING IN_PROGRESS SUCCEEDED FAILED);
my %TRANSPORTS = (framed => 'Thrift::FramedTransport', unframed => 'Thrift::BufferedTransport');

my ($port, $queue, $transport) = @ARGV;
my $connection = $TRANSPORTS{$transport}->new(Thrift::Socket->new('127.0.0.1', $port));
my $service = PinLaterClient->new(Thrift::BinaryProtocol->new($connection));
$connection->open();
my $me = RequestContext->new({source => 'life:perl'});

$service->createQueue($me, $queue);
print exists $service->getQueueNames($me)->{$queue} ? "created\n" : "missing\n";

# Strings here are bytes: what is read is UTF-8, and this file is.
my @jobs = (
    PinLaterJob->new({body => "\x00\xff\x0a\x80"}),
    PinLaterJob->new({
        body => 'grüße, 世界', numAttemptsAllowed => 5, customStatus => 'né; '
    }),
    PinLaterJob->new({body => 'step 1', priority => 3}),
);
my $enqueue = PinLaterEnqueueRequest->new({queueName => $queue, jobs => \@jobs});
my @descriptors = @{$service->enqueueJobs($me, $enqueue)->jobDescriptors};
my ($raw, $text, $steps) = @descriptors;

my $dequeue = PinLaterDequeueRequest->new({queueName => $queue, limit => 10});
my $claimed = $service->dequeueJobs($me, $dequeue);
for my $descriptor (@descriptors) {
    my $about = $claimed->jobMetadata->{$descriptor};
    printf "claimed %s %d of %d attempts %d s\n", unpack('H*', $claimed->jobs->{$descriptor}),
        $about->attemptsRemaining, $about->attemptsAllowed, $about->claimTimeoutSeconds;
}

# Acks and checkpoints name the claim: they apply only as long as it holds.
my %claims = map { $_ => $claimed->jobMetadata->{$_}->claimDescriptor } @descriptors;
my $done = PinLaterJobAckInfo->new({
    jobDescriptor => $raw,
    appendCustomStatus => 'sent ✓',
    claimDescriptor => $claims{$raw},
});
my $in_an_hour = PinLaterJobAckInfo->new({
    jobDescriptor => $text,
    appendCustomStatus => 'später',
    retryDelayMillis => 3_600_000,
    claimDescriptor => $claims{$text},
});
$service->ackDequeuedJobs($me, PinLaterJobAckRequest->new({
    queueName => $queue, jobsSucceeded => [$done], jobsFailed => [$in_an_hour]
}));

# The third job saves how far it got, and goes back to the queue.
my $saved = PinLaterCheckpointJobRequest->new({
    jobDescriptor => $steps,
    newBody => 'step 2',
    moveToPending => 1,
    prependCustomStatus => '½',
    claimDescriptor => $claims{$steps},
});
$service->checkpointJobs($me, PinLaterCheckpointJobsRequest->new({
    queueName => $queue, requests => [$saved]
}));
print 'claimed again ', $service->dequeueJobs($me, $dequeue)->jobs->{$steps}, "\n";
my $finished = PinLaterJobAckInfo->new({jobDescriptor => $steps});
$service->ackDequeuedJobs($me, PinLaterJobAckRequest->new({
    queueName => $queue, jobsSucceeded => [$finished]
}));

my $found = $service->lookupJobs($me, PinLaterLookupJobRequest->new({
    jobDescriptors => \@descriptors, includeBody => 1
}));
for my $descriptor (@descriptors) {
    my $info = $found->{$descriptor};
    printf "found %s %d left %s %s\n", $STATES{$info->jobState}, $info->attemptsRemaining,
        unpack('H*', $info->body), $info->customStatus;
}
my $delayed = $found->{$text};
printf "delayed %d ms\n", $delayed->runAfterTimestampMillis - $delayed->updatedAtTimestampMillis;

my ($scanned, $continuation) = (0, Constants::CONTINUATION_START);
while ($continuation ne Constants::CONTINUATION_END) {
    my $page = $service->scanJobs($me, PinLaterScanJobsRequest->new({
        queueName => $queue,
        jobState => PinLaterJobState::SUCCEEDED,
        continuation => $continuation,
        limit => 1,
    }));
    $scanned += @{$page->scannedJobs};
    $continuation = $page->continuation;
}
print "scanned $scanned\n";

my $count = $service->getJobCount($me, PinLaterGetJobCountRequest->new({
    queueName => $queue, jobState => PinLaterJobState::PENDING, countFutureJobs => 1
}));
print "counted $count\n";

my $nowhere = PinLaterEnqueueRequest->new({queueName => 'nowhere', jobs => \@jobs});
for my $refused (
    sub { $service->enqueueJobs($me, $nowhere) },
    sub { $service->deleteQueue($me, $queue, 'a wrong password') },
) {
    next if eval { $refused->(); 1 };
    my $error = $@;
    die $error unless ref $error && $error->isa('PinLaterException');
    print 'refused ', $error->errorCode, ' ', $error->message, "\n";
}
$connection->close();
